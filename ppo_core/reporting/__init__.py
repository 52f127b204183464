"""Metrics, warnings, sample tables and callbacks of a run."""
