"""The page of a run: everything that a person wants to know about it, in one HTML file."""
