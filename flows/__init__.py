"""Orchestration: the Metaflow flow, the presets, and the pipeline that the steps call."""
