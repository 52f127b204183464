"""Start the flow RLHF if something is new, for the owner of the lease, and record the outcome."""

from collections.abc import Mapping
from typing import Any

from pipeline.tracking.decided_runs import find_decided_run, record_retrain
from ppo_core.errors import ProcessError
from retraining.lease_of_run import lease_of
from retraining.new_inputs import NewInputs
from retraining.start_training import start_training


def retrain(found: NewInputs, from_file: Mapping[str, Any], run: str, *, take_over: bool) -> str:
    """Start the flow RLHF if something is new; print, record and return the outcome.

    Args:
        found: what is new.
        from_file: tables of the settings file.
        run: id of the run of the flow Retrain, which owns the lease.
        take_over: whether to take the lease from a run that holds it.

    Raises:
        ConfigError: the run has no store, or S3 refuses the access.
        ModelError: MLflow does not answer.
        ProcessError: the flow RLHF could not be started, or ended with an error.
        StorageError: S3 does not answer.
    """
    lease = lease_of(found.settings, run)
    if found.seen:
        return _ended(found, run, "nothing new", f"{found.seen} from equal inputs.")
    if (holder := lease.take(take_over=take_over)) is not None:
        return _ended(found, run, "busy", f"The lease belongs to {holder}. Nothing was started.")
    # A run may have decided and released the lease after this run looked for new inputs.
    if decided := find_decided_run(found.compared):
        lease.release()
        return _ended(found, run, "nothing new", f"{decided} from equal inputs.")
    _ended(found, run, "training", f"New: {', '.join(found.new)}.")
    try:
        started = start_training(from_file, run)
    except ProcessError:
        lease.release()
        raise
    print(f"Started {started}.", flush=True)
    return "training"


def _ended(found: NewInputs, run: str, outcome: str, reason: str) -> str:
    """Print and record the outcome, and return it."""
    print(f"{outcome}: {reason}", flush=True)
    record_retrain(found.settings.registered_model, run, outcome, reason, found.lineage)
    return outcome
