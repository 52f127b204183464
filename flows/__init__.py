"""Orchestration: the Metaflow flow, its presets, and the pipeline that its steps call."""
