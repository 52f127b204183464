"""Metrics, warnings, tables and callbacks of a run."""
