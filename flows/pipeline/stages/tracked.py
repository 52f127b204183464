"""Decorators of the stages: fetch and publish files, track a step, and end a step that hangs."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from metaflow import current

from pipeline.cost.usage import measured
from pipeline.inputs.flow_run import FlowRun
from pipeline.launch.stall_watch import watched_step
from pipeline.reports.live.live_card import LiveCard
from pipeline.settings.settings import Settings
from pipeline.storage.manifest import files_of
from pipeline.storage.shared_folder import written_at_end
from pipeline.storage.workspace import Workspace
from pipeline.tracking.run_record import PARENT
from pipeline.tracking.tracker import SHORT_SECONDS, Tracker

Given = ParamSpec("Given")
Made = TypeVar("Made")

LAST_STEP = "end"
"""Last step of the flow; it is tracked in the parent run."""

LARGE = ("answers", "fresh-reward-model", "judge", "policy", "ppo", "reward-model", "sft")
"""Folders of a run with models and checkpoints, or with files of running processes."""


def with_files(*read: str) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """Return a decorator: fetch the files of the arguments `read`, publish the files of the result.

    The function's argument `run` contains the workspace. For the files of a record see
    `Workspace.fetch_files` and `Workspace.publish_files`.
    """

    def decorate(function: Callable[Given, Made]) -> Callable[Given, Made]:
        @wraps(function)
        def on_this_machine(*args: Given.args, **named: Given.kwargs) -> Made:
            given = signature(function).bind(*args, **named)
            given.apply_defaults()
            workspace: Workspace = given.arguments["run"].workspace
            for name in read:
                given.arguments[name] = workspace.fetch_files(given.arguments[name])
            return workspace.publish_files(function(*given.args, **given.kwargs))

        return on_this_machine

    return decorate


def stage(
    step: str, *read: str, patient: bool = False
) -> Callable[[Callable[Concatenate[Tracker, Given], Made]], Callable[Given, Made]]:
    """Return a decorator: track a function as a step, and pass the tracker as first argument.

    For `read` see `with_files`, and for `patient` see `track`.
    """

    def decorate(function: Callable[Concatenate[Tracker, Given], Made]) -> Callable[Given, Made]:
        on_this_machine: Callable[..., Made] = with_files(*read)(function)

        @wraps(function)
        def tracked(*args: Given.args, **named: Given.kwargs) -> Made:
            run: Any = signature(function).bind(None, *args, **named).arguments["run"]
            with track(run, step, patient=patient) as tracker:
                return on_this_machine(tracker, *args, **named)

        return tracked

    return decorate


def card_of_step() -> LiveCard:
    """Return the live card of the current step."""
    return LiveCard(current.get("card"))


@contextmanager
def track(run: FlowRun, step: str, *, patient: bool = False) -> Iterator[Tracker]:
    """Track a step, and yield its tracker.

    Set `patient` for a step that often ends at once because its model is in the cache. A patient
    step imports MLflow only after SHORT_SECONDS. If the step ends earlier, the next step sends the
    entries.
    """
    patience = SHORT_SECONDS if patient else 0.0
    with shared_journal(run):
        tracker = Tracker(run.folder, run.tracking, step, patience=patience)
        if run.workspace.store and current.retry_count:
            # Imported here, because the import loads MLflow, which a short step does not need.
            from pipeline.tracking.mlflow_runs import remember_sent_metrics

            remember_sent_metrics(tracker.journal, [tracker.step.run, tracker.parent.run])
        # `parallel` exists only in a step that runs on several machines.
        parallel = current.get("parallel")
        name = LAST_STEP if step == PARENT else step
        with tracker, measured(name, run, parallel.num_nodes if parallel else 1):
            yield tracker


@contextmanager
def shared_journal(run: FlowRun) -> Iterator[None]:
    """Fetch the journal of earlier steps from S3; at the end, write it back for the next steps.

    Without a copy of the workspace in S3, all steps share the folder of the run, and nothing is
    copied.
    """
    if not run.workspace.store:
        yield
        return
    folder = run.workspace.shared_folder(run.folder, "journal")
    folder.read()
    with written_at_end(lambda: folder.write(_small_files(run.folder))):
        yield


@contextmanager
def watched(
    step: str, settings: Settings | None, run: FlowRun | None, on_hang: Callable[[str], None]
) -> Iterator[None]:
    """Return a context that ends a step that hangs, and shares encoded rows through S3.

    See `watched_step` and `Workspace.sharing_rows`. In the first step, the context does nothing,
    because there are no settings and no run yet.
    """
    if settings is None or run is None:
        yield
        return
    watch = watched_step(
        step,
        run.folder,
        stall_minutes=settings.stall_minutes,
        step_minutes=settings.step_minutes,
        on_hang=on_hang,
    )
    with watch, run.workspace.sharing_rows():
        yield


def has_folder(run: FlowRun) -> bool:
    """Return whether the folder of a run is there; with a store in S3, steps fetch their files.

    The folder is missing if it was deleted, or if a relative `output_dir` begins in another working
    directory than that in which the run was started.
    """
    return bool(run.workspace.store) or run.folder.is_dir()


def _small_files(folder: Path) -> dict[str, Path]:
    """Return the journal, the files in its entries, and the reports; no models or checkpoints."""
    files = files_of(folder).items()
    # Names of unfinished folders begin with a dot.
    # A member of a reward model has a number after the name of its training.
    first = re.compile(r"(.+?)(-\d+)?(/|$)")
    return {n: path for n, path in files if n[0] != "." and first.match(n)[1] not in LARGE}  # type: ignore[index]
