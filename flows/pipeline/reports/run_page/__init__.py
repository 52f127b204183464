"""The page of a run: one HTML file with all results of the run."""
