"""Prompts, batches, and the records that are passed between the phases of a PPO step."""
