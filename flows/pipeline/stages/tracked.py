"""What several stages share: a step's tracker, and the cache of the flow."""

from pathlib import Path

from pipeline.inputs.flow_run import FlowRun
from pipeline.settings.settings import Settings
from pipeline.tracking.tracker import SHORT_SECONDS, Tracker


def track(run: FlowRun, step: str, *, patient: bool = False) -> Tracker:
    """Return the tracker of a step.

    `patient` is for a step without subprocesses that logs at its end. Such a step imports MLflow
    only if it takes long; the next step sends what a short one logged.
    """
    return Tracker(run.folder, run.tracking, step, patience=SHORT_SECONDS if patient else 0.0)


def cache_folder(settings: Settings) -> Path:
    """Return the folder of models and data sets that several runs use."""
    return Path(settings.output_dir) / "cache"
