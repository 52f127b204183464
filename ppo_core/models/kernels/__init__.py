"""Faster versions of computations of transformers, mostly for small models on a CPU."""
