"""Keep the aliases and tags of a registered model in line with its ledger.

The ledger is the truth, and the aliases follow it: each change is appended first and carried out
after that. An alias that differs from the ledger for a while, with nobody at work, was moved in
MLflow itself; the move is appended to the ledger and never undone.

MLflow cannot set an alias only if the alias is unchanged. A process that sets one therefore reads
the ledger again afterwards, and starts over if the ledger has grown: a process that was stopped in
between corrects what it has overwritten when it continues.
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
    point,
    read_aliases,
    set_tags,
)
from pipeline.registry.champion_history import Champions
from pipeline.registry.decisions import Action, Decision, timestamp
from pipeline.registry.ledger import History, Ledger, find_ledger, open_ledger
from pipeline.tracking.mlflow_client import connect, explained

PATIENCE = 2.0
"""Seconds for which nothing may move before an interrupted decision is carried out by another, or a
difference is put down to a person."""

GLANCE = 0.2
"""Seconds between two looks."""

_VERDICTS: Mapping[Action, str] = {
    "promoted": "promoted",
    "refused": "refused",
    "rolled back": "withdrawn",
    "found": "found",
}
"""The tag `promotion` of the version that a decision is about."""


@explained()
def settle(name: str) -> Champions:
    """Carry out what was decided but interrupted, and take over what was moved in MLflow.

    Returns:
        The champions, with whom the alias `champion` agreed when it was last looked at.

    Raises:
        ModelError: the history was deleted.
    """
    client = connect()
    while True:
        look = _watch(client, name)
        if look.agrees:
            return Champions(look.history.decisions)
        ledger = open_ledger(client, name)
        if not look.explained:
            ledger.append(_found(look))
        apply_decisions(client, name, ledger)


def apply_decisions(client: MlflowClient, name: str, ledger: Ledger) -> None:
    """Set aliases and tags to what the ledger says, until it no longer grows meanwhile."""
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
        point(client, name, PREVIOUS, previous if kept else None)
        # The champion last, between two readings: the less time goes by, the less is to put right.
        if ledger.read().decisions == decisions:
            point(client, name, CHAMPION, champions.champion)
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
        # It may have been withdrawn itself, before it was promoted once more.
        set_tags(client, name, decision.champion, {"promotion": "promoted"})


def _end_challenge(client: MlflowClient, name: str, decision: Decision) -> None:
    promoted = decision.action == "promoted"
    if promoted and read_aliases(name).get(CHALLENGER) == decision.version:
        client.delete_registered_model_alias(name, CHALLENGER)


@dataclass(frozen=True)
class _Look:
    """The ledger and the alias, read one after the other."""

    history: History
    alias: int | None

    @property
    def agrees(self) -> bool:
        champion = Champions(self.history.decisions).champion
        return not self.history.pending and self.alias == champion

    @property
    def explained(self) -> bool:
        """Whether the alias is where an interrupted decision can have left it."""
        after, before = self.history.decisions, self.history.decisions[:-1]
        possible = {Champions(after).champion, Champions(before).champion}
        return self.history.pending and self.alias in possible


def _watch(client: MlflowClient, name: str) -> _Look:
    """A look at which ledger and alias agree, or after which nobody was at work for a while."""
    look, since = _look(client, name), time.monotonic()
    while not look.agrees and time.monotonic() - since < PATIENCE:
        time.sleep(GLANCE)
        again = _look(client, name)
        if again != look:
            look, since = again, time.monotonic()
    return look


def _look(client: MlflowClient, name: str) -> _Look:
    # The ledger first: an alias that a decision made afterwards has set is then no surprise, since
    # nothing can be appended after what was read here.
    ledger = find_ledger(client, name)
    history = ledger.read() if ledger else History()
    return _Look(history, read_aliases(name).get(CHAMPION))


def _found(look: _Look) -> Decision:
    """The decision that takes over what somebody did to the alias in MLflow."""
    champion = Champions(look.history.decisions).champion
    if look.alias is None:
        assert champion is not None, "a ledger and an alias that both have no champion agree"
        version = champion
        reason = f"The alias {CHAMPION} of version {champion} was deleted in MLflow."
    else:
        version = look.alias
        origin = "no version" if champion is None else f"version {champion}"
        reason = f"The alias {CHAMPION} was moved in MLflow from {origin} to version {version}."
    return Decision(
        number=len(look.history.decisions) + 1,
        action="found",
        version=version,
        champion=look.alias,
        reasons=(reason,),
        by="somebody in MLflow",
        at=timestamp(),
        key=uuid4().hex,
    )
