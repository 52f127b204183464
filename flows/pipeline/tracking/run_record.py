"""Record the processes of a run of the flow, and end its unfinished MLflow runs.

A killed process cannot end its MLflow runs, which would stay RUNNING or SCHEDULED forever. The next
run of the flow finds the record of the killed run, and ends the MLflow runs of the killed run. A
run that ends removes its own record.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import psutil

from pipeline.launch.process_tree import ProcessIdentity, find_process
from pipeline.tracking.journal import Journal
from pipeline.tracking.run_log import RunLog
from ppo_core.errors.redaction import redact
from ppo_core.io.atomic_files import explained_writes, write_atomically
from ppo_core.io.text_files import parse_json
from ppo_core.io.validation import read_record

PARENT = "parent"
"""Name of the parent run, whose children are the runs of the steps."""

RECORD = "processes.json"
"""Name of the record in the folder of a run of the flow."""

ENDED_EARLY = "ended_early"
"""MLflow tag of a run that ended before its work was done; the value is the reason."""

OUTCOME = "outcome"
"""MLflow tag of a parent run that ended early (failed, refused or killed; RUNS_AGAIN after it was
resumed), and of each run of the flow Retrain."""

RESUMED = "no: it was resumed"
"""Value of the tag ENDED_EARLY of a run that ended early and was resumed."""

RUNS_AGAIN = "resumed"
"""Value of the tag OUTCOME of a parent run that ended early and was resumed."""

NOT_REACHED = "not reached"
"""First words of the tag ENDED_EARLY of a run whose step never started."""

RUNNING_AGAIN = "Running again, after an earlier attempt ended early"
"""Description of a parent run that was resumed and has no outcome yet."""

MAX_REASON_CHARACTERS = 500
"""Maximum length of the reason in the tag of a run that ended early."""


def record_processes(folder: Path) -> None:
    """Record this process and its parent process, the scheduler of the flow.

    Raises:
        TrainingError: the record cannot be written.
    """
    me = psutil.Process()
    processes = [process for process in (me, me.parent()) if process is not None]
    identities = [asdict(ProcessIdentity.of(process)) for process in processes]
    path = folder / RECORD
    with explained_writes(path):
        write_atomically(path, json.dumps(identities), durable=False)


def remove_record(folder: Path) -> None:
    """Remove the record of a run whose runs in MLflow are ended."""
    (folder / RECORD).unlink(missing_ok=True)


def was_killed(folder: Path) -> bool:
    """Return whether the run in `folder` was killed: its record exists, but its processes ended.

    A run on another machine may still be running, so it does not count as killed.
    """
    try:
        found = parse_json((folder / RECORD).read_bytes())
        identities = read_record(found, list[ProcessIdentity])
        return all(each.is_local and find_process(each) is None for each in identities)
    except (OSError, ValueError):
        return False


def end_runs(
    journal: Journal,
    runs: Mapping[str, str],
    outcome: Literal["failed", "refused", "killed"],
    why: str,
    reasons: Sequence[str] = (),
) -> None:
    """End all runs that are not finished, and describe the outcome in the parent run.

    The parent run and the run of a step that was running get the status FAILED, or KILLED if the
    outcome is "killed". The run of a step that was never reached gets the status KILLED.

    Args:
        journal: journal of the run of the flow.
        runs: ids of the MLflow runs by name.
        outcome: outcome of the run of the flow.
        why: sentence for the tag ENDED_EARLY and the description.
        reasons: further sentences for the description.
    """
    for name, run in runs.items():
        status = journal.status(run)
        if status == "FINISHED":
            continue
        log, reached = RunLog(journal, run), name == PARENT or status == "RUNNING"
        log.set_tags({ENDED_EARLY: why if reached else f"{NOT_REACHED}: {why}"})
        journal.set_status(run, "FAILED" if reached and outcome != "killed" else "KILLED")
        if name == PARENT:
            log.set_tags({OUTCOME: outcome})
            log.describe(outcome.capitalize(), [why, *reasons])


def describe_failure(step: str, error: BaseException) -> str:
    """Return which step failed and why, without credentials, as one line for the tag ENDED_EARLY.

    An error without a text, such as KeyboardInterrupt, is described by its class.
    """
    reason = redact(f"{step} failed: {str(error) or repr(error)}")
    return " ".join(reason.split())[:MAX_REASON_CHARACTERS]
