"""Record of the processes of a run of the flow, and the end of runs that are not finished.

A killed process cannot end its runs in MLflow, which would stay RUNNING or SCHEDULED for ever. The
next run finds the record of the killed run, and ends them. The end of a run removes the record.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from pipeline.launch.process_tree import find_process, identity_of, is_local
from pipeline.tracking.journal import Journal
from ppo_core.config.text_files import parse_json
from ppo_core.data.atomic_files import explained_writes, write_atomically
from ppo_core.data.json_form import check_form, is_object

RECORD = "processes.json"
"""Name of the record in the folder of a run of the flow."""

ENDED_EARLY = "ended_early"
"""MLflow tag of a run that ended before its work was done; the value is the reason."""

RESUMED = "no: it was resumed"
"""Value of the tag ENDED_EARLY after a resumed run has started the run again."""


def record_processes(folder: Path) -> None:
    """Record this process and the process that started it, the scheduler of the flow.

    Raises:
        TrainingError: the record cannot be written.
    """
    me = psutil.Process()
    identities = [identity_of(process) for process in (me, me.parent()) if process is not None]
    path = folder / RECORD
    with explained_writes(path):
        write_atomically(path, json.dumps(identities), durable=False)


def remove_record(folder: Path) -> None:
    """Remove the record of a run whose runs in MLflow are ended."""
    (folder / RECORD).unlink(missing_ok=True)


def was_killed(folder: Path) -> bool:
    """Return whether the run in `folder` was killed: it has a record, but its processes ended.

    A run on another machine may still be running.
    """
    try:
        identities = parse_json((folder / RECORD).read_bytes())
        check_form(identities, [is_object])
        return all(is_local(each) and find_process(each) is None for each in identities)
    except (OSError, ValueError):
        return False


def end_runs(
    journal: Journal, runs: Mapping[str, str], reason: str, *, failed: Collection[str] = ()
) -> None:
    """End all runs that are not finished: those named in `failed` as FAILED, others as KILLED.

    Args:
        journal: journal of the run of the flow.
        runs: ids of the MLflow runs by name.
        reason: text for the tag ENDED_EARLY.
        failed: names of the runs whose work failed; the work of the other runs never started.
    """
    for name, run in runs.items():
        if journal.status(run) != "FINISHED":
            journal.set_tag(run, ENDED_EARLY, reason)
            journal.set_status(run, "FAILED" if name in failed else "KILLED")
