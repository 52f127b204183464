"""Prompts, batches, and the records that one phase hands to the next."""
