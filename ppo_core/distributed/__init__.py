"""Processes, sharding, collectives, and the launcher of training processes."""
