"""Withdraw a champion that users like less; start the flow RLHF if an input is new.

The flow RLHF starts with the lease, which is the right to train.
"""

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from human_feedback.withdraw_champion import watch_champion
from pipeline.stages.given_settings import read_settings
from pipeline.tracking.decided_runs import find_decided_run, record_retrain
from ppo_core.errors import DataError, ModelError, PPOError, reason_of
from retraining.alarms import send_alarm
from retraining.lease_of_run import lease_of
from retraining.retraining_trigger import NewInputs
from retraining.start_training import start_training


def watch_feedback(from_file: Mapping[str, Any], run: str, topic: str) -> None:
    """Withdraw the champion if users like it less than the previous champion; print the result.

    Do nothing unless `promotion.withdraw_alpha` is set. If no served answers are recorded, print
    that the two champions were not compared. If MLflow refuses the withdrawal, send an alarm to
    `topic`. Neither prevents a training.
    """
    settings = read_settings(from_file, {}, ())
    alpha = settings.promotion.withdraw_alpha
    if alpha is None:
        return
    try:
        told = watch_champion(
            settings.registered_model, by=f"run {run}", alpha=alpha, withdraw=True
        )
    except DataError as error:
        # A service that does not record its answers must not prevent the training.
        told = f"not compared: {error}"
    except ModelError as error:
        told = f"failed: {error}"
        name = settings.registered_model
        send_alarm(topic, f"{name}: its champion was not compared or not withdrawn", [str(error)])
    print(f"feedback: {told}", flush=True)


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
        return record(
            "busy",
            f"The lease belongs to {holder}. Nothing was started. If that run is dead, repeat with "
            "--take-over; in a deployment, this is `python flows/deploy.py DEPLOYMENT.toml --start "
            "--take-over`.",
        )
    try:
        # Another run may have made a decision after this run compared the inputs.
        if decided := find_decided_run(found.compared):
            lease.release()
            return record("nothing new", decided)
        new = f"New: {', '.join(found.new)}."
        print(f"{new} The flow RLHF starts.", flush=True)
        started = start_training(from_file, run)
    except (PPOError, KeyboardInterrupt) as error:
        try:
            lease.release()
        finally:
            # Record the outcome even if the release fails, so that the first error is known.
            record("failed", reason_of(error))
        raise
    return record("training", f"{new} Started {started}.")


def _record(found: NewInputs, run: str, started: datetime, outcome: str, reason: str) -> str:
    """Print and record the outcome, and return it; if MLflow does not answer, print a warning.

    The step must not fail for this reason, because a retry of the step would start a second run.
    """
    print(f"{outcome}: {reason}", flush=True)
    name = found.settings.registered_model
    try:
        record_retrain(name, run, outcome, reason, found.lineage, started)
    except ModelError as error:
        print(f"Warning: The outcome is not in MLflow: {error}", file=sys.stderr, flush=True)
    return outcome
