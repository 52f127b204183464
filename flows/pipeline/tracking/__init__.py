"""Runs and metrics in MLflow; all entries are first written to disk."""
