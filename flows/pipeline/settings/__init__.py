"""Settings of a run of the flow."""
