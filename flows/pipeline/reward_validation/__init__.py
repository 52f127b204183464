"""Decide whether a reward model is fit to train a policy against."""
