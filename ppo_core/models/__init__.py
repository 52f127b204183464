"""Policy, critic, reference and reward model."""
