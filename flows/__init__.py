"""Orchestration: the Metaflow flows, the presets, and the pipeline that their steps call."""
