"""Tracker and watch, which several stages use."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from metaflow import current

from pipeline.cost.usage import measured
from pipeline.inputs.flow_run import FlowRun
from pipeline.launch.stall_watch import watched_step
from pipeline.settings.settings import Settings
from pipeline.storage.manifest import files_of
from pipeline.tracking.run_record import PARENT
from pipeline.tracking.tracker import SHORT_SECONDS, Tracker

LAST_STEP = "end"
"""Step of the flow that the parent run tracks."""

LARGE = ("answers", "judge", "policy", "ppo", "reward-model", "sft")
"""Folders of a run with models and checkpoints, or with files of running processes."""


@contextmanager
def track(run: FlowRun, step: str, *, patient: bool = False) -> Iterator[Tracker]:
    """Track a step, and yield its tracker.

    Set `patient` for a step that often ends at once, because its model is in the cache. Such a step
    imports MLflow only if it runs longer than SHORT_SECONDS; otherwise the next step sends its
    entries.
    """
    patience = SHORT_SECONDS if patient else 0.0
    with shared_journal(run):
        tracker = Tracker(run.folder, run.tracking, step, patience=patience)
        if run.workspace.store and current.retry_count:
            # Imported here: it imports MLflow, which a short step does without.
            from pipeline.tracking.sent_metrics import remember_sent_metrics

            remember_sent_metrics(tracker.journal, tracker.step.run)
        # Only a step that several machines share has it.
        parallel = current.get("parallel")
        name = LAST_STEP if step == PARENT else step
        with tracker, measured(name, run, parallel.num_nodes if parallel else 1):
            yield tracker


@contextmanager
def shared_journal(run: FlowRun) -> Iterator[None]:
    """Read the journal that earlier steps have left in S3, and leave it there for the next ones.

    Without a copy of the workspace in S3, all steps share the folder of the run.
    """
    if not run.workspace.store:
        yield
        return
    folder = run.workspace.shared_folder(run.folder, "journal")
    folder.read()
    try:
        yield
    finally:
        folder.write(_small_files(run.folder))


@contextmanager
def watched(step: str, settings: Settings | None, run: FlowRun | None) -> Iterator[None]:
    """End the process of a step that hangs, see `watched_step`, and share encoded rows meanwhile.

    The first step has no settings and no run yet, and is not watched.
    """
    if settings is None or run is None:
        yield
        return
    watch = watched_step(
        step,
        run.folder,
        stall_minutes=settings.stall_minutes,
        step_minutes=settings.step_minutes,
    )
    with watch, run.workspace.sharing_rows():
        yield


def _small_files(folder: Path) -> dict[str, Path]:
    """Return the journal, what it refers to, and the reports; not the models and checkpoints."""
    files = files_of(folder).items()
    # Names of unfinished folders begin with a dot.
    return {n: path for n, path in files if n[0] != "." and n.split("/")[0] not in LARGE}
