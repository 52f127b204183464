"""Tracker and cache folder, which several stages use."""

from pathlib import Path

from pipeline.inputs.flow_run import FlowRun
from pipeline.settings.settings import Settings
from pipeline.tracking.tracker import SHORT_SECONDS, Tracker


def track(run: FlowRun, step: str, *, patient: bool = False) -> Tracker:
    """Return the tracker of a step.

    Set `patient` for a step without subprocesses that logs at its end. Such a step imports MLflow
    only if it runs longer than SHORT_SECONDS; otherwise the next step sends its entries.
    """
    return Tracker(run.folder, run.tracking, step, patience=SHORT_SECONDS if patient else 0.0)


def cache_folder(settings: Settings) -> Path:
    """Return the cache folder for models and data sets, which several runs share."""
    return Path(settings.output_dir) / "cache"
