"""Set the aliases and tags of a registered model according to its ledger.

The ledger, the history of decisions, is authoritative: each decision is first appended to the
ledger, and then aliases and tags are set. If the alias `champion` differs from the ledger, a
process waits until nothing has changed for TIMEOUT seconds. If no interrupted decision explains the
difference, somebody moved the alias in MLflow. This move is appended to the ledger, never undone.

MLflow has no compare-and-swap for aliases. Therefore a process that has set an alias reads the
ledger again, and starts over if the ledger has grown. In this way, a process that was suspended and
then set an outdated alias corrects the alias.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

from mlflow import MlflowClient

from pipeline.registry.aliases import (
    CHALLENGER,
    CHAMPION,
    PREVIOUS,
    exists,
    read_aliases,
    set_alias,
    set_tags,
)
from pipeline.registry.champion_history import Champions
from pipeline.registry.decisions import Action, Decision, timestamp
from pipeline.registry.ledger import History, Ledger, find_ledger, open_ledger
from pipeline.tracking.mlflow_client import connect, explained

TIMEOUT = 2.0
"""Seconds without change after which a difference between alias and ledger is resolved: an
interrupted decision is carried out, and any other difference counts as a move by a person."""

POLL_SECONDS = 0.2
"""Seconds between two observations."""

_VERDICTS: Mapping[Action, str] = {
    "promoted": "promoted",
    "refused": "refused",
    "rolled back": "withdrawn",
    "found": "found",
}
"""Value of the version's tag `promotion`, by the action of the decision."""


@explained()
def sync_aliases(name: str) -> Champions:
    """Carry out interrupted decisions, and record an alias that was moved in MLflow.

    Returns:
        The champions according to the ledger. When the alias `champion` was last read, the alias
        agreed with the ledger.

    Raises:
        ModelError: the ledger was deleted.
    """
    client = connect()
    while True:
        observed = _watch(client, name)
        if observed.agrees:
            return Champions(observed.history.decisions)
        ledger = open_ledger(client, name)
        if not observed.explained:
            ledger.append(_found(observed))
        apply_decisions(client, name, ledger)


def apply_decisions(client: MlflowClient, name: str, ledger: Ledger) -> None:
    """Set aliases and tags according to the ledger; start over if the ledger grew meanwhile."""
    history = ledger.read()
    carried_out = history.applied
    while True:
        decisions = history.decisions
        for decision in decisions[carried_out:]:
            _tag(client, name, decision)
            _end_challenge(client, name, decision)
        ledger.describe(decisions)
        champions = Champions(decisions)
        previous = champions.previous
        kept = previous is not None and exists(client, name, previous)
        set_alias(client, name, PREVIOUS, previous if kept else None)
        # Set the alias `champion` last and between two reads of the ledger, so that it is rarely
        # outdated.
        if ledger.read().decisions == decisions:
            set_alias(client, name, CHAMPION, champions.champion)
        history = ledger.read()
        if history.decisions == decisions:
            ledger.mark_applied(len(decisions))
            return


def _tag(client: MlflowClient, name: str, decision: Decision) -> None:
    tags = {
        "promotion": _VERDICTS[decision.action],
        "promotion_reasons": "\n".join(decision.reasons),
        "promotion_at": decision.at,
        "promotion_by": decision.by,
    }
    set_tags(client, name, decision.version, tags)
    if decision.action == "rolled back" and decision.champion is not None:
        # An earlier rollback may have tagged this version as withdrawn.
        set_tags(client, name, decision.champion, {"promotion": "promoted"})


def _end_challenge(client: MlflowClient, name: str, decision: Decision) -> None:
    promoted = decision.action == "promoted"
    if promoted and read_aliases(name).get(CHALLENGER) == decision.version:
        client.delete_registered_model_alias(name, CHALLENGER)


@dataclass(frozen=True)
class _Observation:
    """The history in the ledger, and the version of the alias `champion`, read after the ledger."""

    history: History
    alias: int | None

    @property
    def agrees(self) -> bool:
        champion = Champions(self.history.decisions).champion
        return not self.history.pending and self.alias == champion

    @property
    def explained(self) -> bool:
        """Whether an interrupted decision explains the difference between alias and ledger."""
        after, before = self.history.decisions, self.history.decisions[:-1]
        possible = {Champions(after).champion, Champions(before).champion}
        return self.history.pending and self.alias in possible


def _watch(client: MlflowClient, name: str) -> _Observation:
    """Return an observation that agrees, or that has not changed for TIMEOUT seconds."""
    observed, since = _observe(client, name), time.monotonic()
    while not observed.agrees and time.monotonic() - since < TIMEOUT:
        time.sleep(POLL_SECONDS)
        again = _observe(client, name)
        if again != observed:
            observed, since = again, time.monotonic()
    return observed


def _observe(client: MlflowClient, name: str) -> _Observation:
    # Read the ledger first. If another process then decides and moves the alias, the alias seems to
    # be moved by a person. The decision of that process has taken the next number of the ledger, so
    # the wrong decision `found`, which has the same number, is not appended.
    ledger = find_ledger(client, name)
    history = ledger.read() if ledger else History()
    return _Observation(history, read_aliases(name).get(CHAMPION))


def _found(observed: _Observation) -> Decision:
    """Return the decision that records a change of the alias in MLflow."""
    champion = Champions(observed.history.decisions).champion
    if observed.alias is None:
        assert champion is not None, "a ledger and an alias that both have no champion agree"
        version = champion
        reason = f"The alias {CHAMPION} of version {champion} was deleted in MLflow."
    else:
        version = observed.alias
        origin = "no version" if champion is None else f"version {champion}"
        reason = f"The alias {CHAMPION} was moved in MLflow from {origin} to version {version}."
    return Decision(
        number=len(observed.history.decisions) + 1,
        action="found",
        version=version,
        champion=observed.alias,
        reasons=(reason,),
        by="somebody in MLflow",
        at=timestamp(),
        key=uuid4().hex,
    )
