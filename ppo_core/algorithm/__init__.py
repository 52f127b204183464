"""Formulas of PPO on floats and tensors; this package needs only torch."""
