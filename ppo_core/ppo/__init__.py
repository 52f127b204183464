"""One update of PPO: collect, score, update."""
