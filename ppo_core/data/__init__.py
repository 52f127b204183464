"""Data sets, prompts, batches, and the records passed between the phases of a PPO step."""
