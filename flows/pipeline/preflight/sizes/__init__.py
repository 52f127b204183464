"""Sizes of a run before it starts: rows, tokens, memory, time and price."""
