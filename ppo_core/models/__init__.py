"""The policy, the critic, the reference and the reward model."""
