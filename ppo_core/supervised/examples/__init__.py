"""Rows of supervised training as token ids, and their batches."""
