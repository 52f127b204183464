"""Rows of prompts, preferences and demonstrations, in one form whatever their columns are."""
