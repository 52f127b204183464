"""The history of the decisions on a registered model, to which nobody can append unseen.

MLflow's aliases have no compare-and-swap: of two who set one, the later overwrites the earlier and
neither learns of it. A parameter of a run is safer. Its key is a primary key of the database, so of
two different values the server takes one and refuses the other, while the same value again is no
error. So the decisions are the parameters 0001, 0002, ... of one run, and who appends number n + 1
has seen all n before it: a compare-and-append, which a request that is sent twice does not double.

A decision is first appended, then carried out (aliases and tags follow it), then marked by the
parameter "0001 applied". One without that mark was interrupted: anybody can carry it out again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from pipeline.registry.decisions import Decision, as_markdown, decode, encode
from pipeline.tracking.mlflow_client import create_experiment
from ppo_core.errors import ModelError

RUN_TAG = "decisions_run"
"""Tag of the experiment: id of the run that holds the decisions."""

NOTE = "mlflow.note.content"
"""Tag of a run that MLflow shows as its description, in Markdown."""


@dataclass(frozen=True)
class History:
    """What a ledger held when it was read."""

    decisions: tuple[Decision, ...] = ()
    """In their order."""

    applied: int = 0
    """Number of the last one that is known to have been carried out; 0 for none."""

    @property
    def pending(self) -> bool:
        """Whether the last decision may not have been carried out yet."""
        return self.applied < len(self.decisions)


@dataclass(frozen=True)
class Ledger:
    """The ledger of one registered model, in the run `run_id`."""

    client: MlflowClient
    run_id: str

    def read(self) -> History:
        """All decisions as they are now.

        Raises:
            ModelError: the run was deleted, or holds what cannot be read.
        """
        run = self.client.get_run(self.run_id)
        if run.info.lifecycle_stage != "active":
            raise ModelError(
                f"The MLflow run {self.run_id}, which holds the history of the promotions, was "
                f"deleted. Without it nobody knows what the champion replaced: restore it with "
                f"`mlflow runs restore --run-id {self.run_id}`."
            )
        params: dict[str, str] = run.data.params
        numbers = sorted(int(key) for key in params if re.fullmatch(r"\d{4,}", key))
        applied = [number for number in numbers if f"{_key(number)} applied" in params]
        return History(
            tuple(decode(number, params[_key(number)]) for number in numbers),
            max(applied, default=0),
        )

    def append(self, decision: Decision) -> None:
        """Offer a decision for its number; reading tells whether it or another one got it.

        Raises:
            MlflowException: it was not written, and not because its number is taken.
        """
        number = _key(decision.number)
        try:
            self.client.log_param(self.run_id, number, encode(decision))
        except MlflowException:
            # Refused, or written and the reply was lost: what is there says which.
            if number not in self.client.get_run(self.run_id).data.params:
                raise

    def mark_applied(self, number: int) -> None:
        """Note that a decision has been carried out."""
        self.client.log_param(self.run_id, f"{_key(number)} applied", "yes")

    def describe(self, decisions: Sequence[Decision]) -> None:
        """Show the history to people who look at the run in MLflow."""
        self.client.set_tag(self.run_id, NOTE, as_markdown(decisions))


def find_ledger(client: MlflowClient, name: str) -> Ledger | None:
    """The ledger of the registered model `name`; None before its first decision.

    Raises:
        ModelError: it was deleted, or its experiment is not one of ours.
    """
    title = _title(name)
    experiment = client.get_experiment_by_name(title)
    if experiment is None:
        return None
    number = experiment.experiment_id
    if experiment.lifecycle_stage != "active":
        raise ModelError(
            f"The MLflow experiment '{title}', which holds the history of the promotions, was "
            f"deleted. Without it nobody knows what the champion replaced: restore it with "
            f"`mlflow experiments restore --experiment-id {number}`, or, to begin a new history, "
            f"rename it after that."
        )
    if RUN_TAG not in experiment.tags:
        raise ModelError(
            f"The MLflow experiment '{title}' has no tag {RUN_TAG}: it is not the history of the "
            f"promotions, for which this name is kept. Rename experiment {number} in MLflow."
        )
    return Ledger(client, experiment.tags[RUN_TAG])


def open_ledger(client: MlflowClient, name: str) -> Ledger:
    """The ledger of the registered model `name`, made now if there is none.

    It is made whole under a name of its own and then renamed. Names of experiments are unique, so
    of several who do that at once one succeeds, and the others use what it made.
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
