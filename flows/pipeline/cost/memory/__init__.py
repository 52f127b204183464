"""Compute the memory of a training from the sizes of its models and batches; nothing is loaded."""
