"""Tracker, watch and cache folder, which several stages use."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pipeline.inputs.flow_run import FlowRun
from pipeline.launch.stall_watch import watched_step
from pipeline.settings.settings import Settings
from pipeline.tracking.tracker import SHORT_SECONDS, Tracker


def track(run: FlowRun, step: str, *, patient: bool = False) -> Tracker:
    """Return the tracker of a step.

    Set `patient` for a step that often ends at once, because its model is in the cache. Such a step
    imports MLflow only if it runs longer than SHORT_SECONDS; otherwise the next step sends its
    entries.
    """
    return Tracker(run.folder, run.tracking, step, patience=SHORT_SECONDS if patient else 0.0)


def watched(
    step: str, settings: Settings | None, run: FlowRun | None
) -> AbstractContextManager[None]:
    """Return a context that ends the process of a step that hangs; see `watched_step`.

    The first step has no settings and no run yet, and is not watched.
    """
    if settings is None or run is None:
        return nullcontext()
    return watched_step(
        step,
        run.folder,
        stall_minutes=settings.stall_minutes,
        step_minutes=settings.step_minutes,
    )


def cache_folder(settings: Settings) -> Path:
    """Return the cache folder for models and data sets, which several runs share."""
    return Path(settings.output_dir) / "cache"
