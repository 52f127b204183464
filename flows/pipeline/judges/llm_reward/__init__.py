"""Language models as rewards of PPO: they score each response by a rubric."""
