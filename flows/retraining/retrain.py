"""If an input is new, take the lease (the right to train) and start the flow RLHF."""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pipeline.tracking.decided_runs import find_decided_run, record_retrain
from ppo_core.errors import PPOError, reason_of
from retraining.lease_of_run import lease_of
from retraining.new_inputs import NewInputs
from retraining.start_training import start_training


def retrain(found: NewInputs, from_file: Mapping[str, Any], run: str, *, take_over: bool) -> str:
    """Start the flow RLHF if an input is new; print, record and return the outcome.

    Args:
        found: the result of `find_new_inputs`.
        from_file: tables of the settings file.
        run: id of the run of the flow Retrain, which becomes the owner of the lease.
        take_over: whether to take the lease from another run.

    Raises:
        ConfigError: the run has no store, or S3 refuses the access.
        ModelError: MLflow does not answer.
        ProcessError: the flow RLHF could not be started, or ended with an error.
        StorageError: S3 does not answer.
    """
    lease, record = lease_of(found.settings, run), partial(_record, found, run, datetime.now(UTC))
    if found.seen:
        return record("nothing new", found.seen)
    if (holder := lease.take(take_over=take_over)) is not None:
        return record("busy", f"The lease belongs to {holder}. Nothing was started.")
    try:
        # Another run may have made a decision after this run compared the inputs.
        if decided := find_decided_run(found.compared):
            lease.release()
            return record("nothing new", decided)
        new = f"New: {', '.join(found.new)}."
        print(f"{new} The flow RLHF starts.", flush=True)
        started = start_training(from_file, run)
    except PPOError as error:
        try:
            lease.release()
        finally:
            # Record the outcome even if the release fails, so that the first error is known.
            record("failed", reason_of(error))
        raise
    return record("training", f"{new} Started {started}.")


def _record(found: NewInputs, run: str, started: datetime, outcome: str, reason: str) -> str:
    """Print and record the outcome, and return it."""
    print(f"{outcome}: {reason}", flush=True)
    name = found.settings.registered_model
    record_retrain(name, run, outcome, reason, found.lineage, started)
    return outcome
