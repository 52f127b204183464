"""Start the processes of PPO and follow them."""
