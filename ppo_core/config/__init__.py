"""Settings of a run, checked when they are made."""
