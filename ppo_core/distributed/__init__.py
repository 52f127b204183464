"""Processes, sharding, collectives, and the launcher."""
