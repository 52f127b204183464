"""Faster computation than that of transformers, mostly for small models on a CPU."""
