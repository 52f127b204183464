"""Rows of prompts, preferences and demonstrations, converted from all known columns to one form."""
