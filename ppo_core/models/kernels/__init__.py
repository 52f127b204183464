"""A fast path for small models on a CPU."""
