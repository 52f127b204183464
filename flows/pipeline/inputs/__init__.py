"""Data sets, caches and the lineage of a run."""
