"""The trainer and its command line."""
