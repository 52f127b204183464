"""End the MLflow runs of a failed first step, and the MLflow runs of killed runs of the flow."""

from collections.abc import Mapping
from pathlib import Path

from mlflow.exceptions import MlflowException

from pipeline.tracking.journal import Journal
from pipeline.tracking.mlflow_runs import find_runs
from pipeline.tracking.run_record import (
    OUTCOME,
    PARENT,
    describe_failure,
    end_runs,
    remove_record,
    was_killed,
)
from pipeline.tracking.sender_thread import Sender
from ppo_core.errors import PPOError
from ppo_core.errors.redaction import redact

SECONDS = 20.0
"""Maximum wait in seconds until MLflow has the entries of a killed run or a failed first step."""

REASON = "The run of the flow was killed. The next run ended it in MLflow."


def end_killed_runs(folder: Path, flow: str) -> None:
    """End the MLflow runs of all killed runs of a flow, and send the entries that they left.

    An error is printed. The next run of the flow then ends the remaining MLflow runs.

    Args:
        folder: folder of the runs of the flow, each in a subfolder with its number as name.
        flow: name of the flow.
    """
    try:
        for killed in sorted(path for path in folder.iterdir() if was_killed(path)):
            _end(killed, f"{flow}/{killed.name}")
    except (PPOError, MlflowException, OSError) as error:
        print(f"Warning: An earlier run was not ended in MLflow: {redact(error)}", flush=True)


def end_failed_start(folder: Path, runs: Mapping[str, str], error: BaseException) -> None:
    """End the MLflow runs that the failed first step created; an error is printed.

    In the other steps, `Tracker` ends the runs.

    Args:
        folder: folder of the run of the flow.
        runs: ids of the MLflow runs, from `start_runs`.
        error: the error of the step.
    """
    try:
        journal = Journal(folder)
        end_runs(journal, runs, "failed", describe_failure("start", error))
        _send(journal)
    except PPOError as also:
        print(f"Warning: The runs in MLflow are not ended: {also}", flush=True)


def _end(folder: Path, flow_run: str) -> None:
    runs = find_runs(flow_run)
    if not runs:
        return  # another server tracked the run
    journal = Journal(folder)
    # A step that ended while MLflow was away has ended the runs in the journal, not in MLflow.
    has_failed = journal.tag(runs[PARENT], OUTCOME) in ("failed", "refused")
    has_ended = has_failed or journal.status(runs[PARENT]) == "FINISHED"
    if not has_ended:
        end_runs(journal, runs, "killed", REASON)
    if _send(journal) and not has_ended:
        print(
            f"{flow_run} was killed. Its MLflow runs are ended. To continue it: "
            f"`python flows/rlhf.py resume --origin-run-id {folder.name}`; if Retrain started it, "
            "start Retrain again.",
            flush=True,
        )


def _send(journal: Journal) -> bool:
    """Send the entries of a run that ended; return whether MLflow has them all."""
    sender = Sender(journal)
    sender.start()
    if is_sent := sender.flush(SECONDS):
        remove_record(journal.folder)
    sender.stop()
    return is_sent
