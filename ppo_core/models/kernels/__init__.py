"""Faster computation than in transformers, mostly for small models on a CPU."""
