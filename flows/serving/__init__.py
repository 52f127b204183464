"""What a service copies to load a champion; it needs nothing of the pipeline."""
