"""Supervised fine-tuning and reward-model training, in one process or several."""
