"""Runs and metrics in MLflow, on disk first."""
