"""Load the champion of a registered model. A service needs only this package, not the pipeline."""
