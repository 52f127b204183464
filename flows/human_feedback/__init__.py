"""Feedback of users: read from traces and files, checked, and written as training data."""
