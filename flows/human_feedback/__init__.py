"""Read users' feedback from traces and files, check it, and write it as training data."""
