"""Supervised fine-tuning and reward-model training over transformers.Trainer."""
