"""The ledger of a registered model: all decisions on its champion. Processes may append at once.

MLflow's aliases have no compare-and-swap: if two processes set an alias, the later process
overwrites the alias, and neither process notices. A parameter of a run is safe, because the server
never changes its value: it accepts the first value and equal values, and refuses other values.
Therefore the decisions are stored as the parameters 0001, 0002, ... of one run. A process appends
number n + 1 only after it has read all n earlier decisions, and a repeated request adds nothing.

A decision is first appended, then carried out by setting aliases and tags, and then marked with
the parameter "0001 applied". A decision without this mark was interrupted, and any process can
carry it out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from pipeline.registry.decisions import Decision, as_markdown, decode, encode
from pipeline.tracking.mlflow_client import create_experiment
from pipeline.tracking.run_log import DESCRIPTION
from ppo_core.errors import ModelError

RUN_TAG = "decisions_run"
"""Tag of the experiment: id of the run whose parameters are the decisions."""


@dataclass(frozen=True)
class History:
    """The content of a ledger at one time."""

    decisions: tuple[Decision, ...] = ()
    """The decisions in order."""

    applied: int = 0
    """Number of the last decision that is marked as carried out; 0 if no decision is marked."""

    @property
    def pending(self) -> bool:
        """Whether the last decision is not yet marked as carried out."""
        return self.applied < len(self.decisions)


@dataclass(frozen=True)
class Ledger:
    """The ledger of one registered model, in the run `run_id`."""

    client: MlflowClient
    run_id: str

    def read(self) -> History:
        """Return the decisions so far.

        Raises:
            ModelError: the run was deleted, or a decision cannot be read.
        """
        run = self.client.get_run(self.run_id)
        if run.info.lifecycle_stage != "active":
            raise ModelError(
                f"The MLflow run {self.run_id}, which holds the history of the promotions, was "
                f"deleted. Without it nobody knows what the champion replaced: restore it with "
                f"`mlflow runs restore --run-id {self.run_id}`."
            )
        params: dict[str, str] = run.data.params
        # `_key` writes numbers of more than four digits without leading zeros.
        numbers = sorted(
            int(key) for key in params if re.fullmatch(r"[0-9]{4}|[1-9][0-9]{4,8}", key)
        )
        applied = [number for number in numbers if f"{_key(number)} applied" in params]
        return History(
            tuple(decode(number, params[_key(number)]) for number in numbers),
            max(applied, default=0),
        )

    def append(self, decision: Decision) -> None:
        """Write a decision, unless another process has written a decision with the same number.

        In both cases, `read` then returns the decision with this number.

        Raises:
            MlflowException: the decision was not written although its number is free.
        """
        number = _key(decision.number)
        try:
            self.client.log_param(self.run_id, number, encode(decision))
        except MlflowException:
            # The number was taken, or the reply to a successful request was lost.
            if number not in self.client.get_run(self.run_id).data.params:
                raise

    def mark_applied(self, number: int) -> None:
        """Mark a decision as carried out."""
        self.client.log_param(self.run_id, f"{_key(number)} applied", "yes")

    def describe(self, decisions: Sequence[Decision]) -> None:
        """Write the history into the description of the run."""
        self.client.set_tag(self.run_id, DESCRIPTION, as_markdown(decisions))


def find_ledger(client: MlflowClient, name: str) -> Ledger | None:
    """Return the ledger of the registered model `name`; None before its first decision.

    Raises:
        ModelError: the ledger was deleted, or another experiment has its name.
    """
    title = _title(name)
    experiment = client.get_experiment_by_name(title)
    if experiment is None:
        return None
    number = experiment.experiment_id
    if experiment.lifecycle_stage != "active":
        raise ModelError(
            f"The MLflow experiment '{title}', which holds the history of the promotions, was "
            f"deleted. Without it, nobody knows which version the champion replaced. Restore it "
            f"with `mlflow experiments restore --experiment-id {number}`. To begin a new history, "
            f"rename the experiment after restoring it."
        )
    if RUN_TAG not in experiment.tags:
        raise ModelError(
            f"The MLflow experiment '{title}' has no tag {RUN_TAG}: it is not the history of the "
            f"promotions, for which this name is kept. Rename experiment {number} in MLflow."
        )
    return Ledger(client, experiment.tags[RUN_TAG])


def open_ledger(client: MlflowClient, name: str) -> Ledger:
    """Return the ledger of the registered model `name`; create it if needed.

    The experiment is first completed under a temporary name and then renamed. Experiment names are
    unique, so only one of several concurrent processes succeeds, and the others use its ledger.
    """
    if ledger := find_ledger(client, name):
        return ledger
    experiment = create_experiment(client, f"{_title(name)}, unfinished {uuid4().hex}")
    run = client.create_run(experiment, run_name="decisions")
    client.update_run(run.info.run_id, status="FINISHED")
    client.set_experiment_tag(experiment, RUN_TAG, run.info.run_id)
    try:
        client.rename_experiment(experiment, _title(name))
    except MlflowException:
        winner = find_ledger(client, name)
        if winner is None:
            raise
        if winner.run_id != run.info.run_id:
            client.delete_experiment(experiment)
        return winner
    return Ledger(client, run.info.run_id)


def _key(number: int) -> str:
    return f"{number:04d}"


def _title(name: str) -> str:
    return f"promotions of {name}"
