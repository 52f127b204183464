"""The Metaflow flows, the presets of settings, and the pipeline that the flows' steps call."""
