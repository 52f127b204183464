"""The formulas of PPO: torch alone, floats and tensors in and out."""
