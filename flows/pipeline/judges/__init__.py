"""Judges that compare two answers to a prompt: chat models, reward models and functions."""
