"""Prompts in, sampled responses out."""
