"""Register a version and decide on its promotion."""
