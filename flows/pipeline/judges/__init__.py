"""Judges: who compares two answers, and how they are asked."""
