"""Load the champion of a registered model; a service copies this package without the pipeline."""
