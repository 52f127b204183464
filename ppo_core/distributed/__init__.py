"""Processes, sharding, and the launcher."""
