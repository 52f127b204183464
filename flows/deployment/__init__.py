"""Deploy both flows to a scheduler, as one file says."""
