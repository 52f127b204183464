"""Supervised fine-tuning and reward-model training, thin over transformers.Trainer."""
