"""Computations that are faster than those of transformers, mostly for small models on a CPU."""
