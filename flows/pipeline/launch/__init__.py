"""Start and monitor the processes of a PPO training."""
