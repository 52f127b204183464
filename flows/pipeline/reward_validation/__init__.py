"""Is this reward model fit to train against?"""
