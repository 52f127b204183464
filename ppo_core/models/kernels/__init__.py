"""Faster computation of small models on a CPU than by transformers."""
