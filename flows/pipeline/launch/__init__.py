"""Start the processes of a PPO training and follow them."""
