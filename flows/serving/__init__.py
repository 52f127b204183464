"""Load the champion of a registered model. A service can use this package without the pipeline."""
