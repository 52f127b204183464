"""Checks, readers and writers of model files."""
