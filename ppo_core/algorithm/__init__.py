"""The formulas of PPO: functions of floats and tensors that import only torch."""
