"""The formulas of PPO on floats and tensors; they need only torch and the standard library."""
