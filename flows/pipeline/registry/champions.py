"""Which version of a registered model is champion, and how another one becomes it.

The ledger is the truth, and the aliases follow it: each change is appended first and carried out
after that. An alias that differs from the ledger for a while, with nobody at work, was moved in
MLflow itself; that is taken into the ledger, never undone.

MLflow cannot set an alias only if it is still what it was. Whoever sets one therefore reads the
ledger again afterwards, and starts anew if it has grown: one that was stopped in between and runs
on puts right what it has overwritten.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from shlex import quote
from uuid import uuid4

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from pipeline.registry.aliases import (
    CHALLENGER,
    CHAMPION,
    PREVIOUS,
    exists,
    point,
    raise_unless_missing,
    read_aliases,
    set_tags,
)
from pipeline.registry.champion_history import Champions
from pipeline.registry.ledger import (
    Action,
    Decision,
    History,
    Ledger,
    find_ledger,
    open_ledger,
    plain,
)
from pipeline.tracking.mlflow_client import connect, explained
from ppo_core.errors import ModelError

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
def read_champions(name: str) -> Champions:
    """The champions by the history, which is only read.

    Raises:
        ModelError: there is no such registered model, or its history was deleted.
    """
    client = connect()
    try:
        client.get_registered_model(name)
    except MlflowException as error:
        raise_unless_missing(error)
        raise ModelError(
            f"MLflow has no registered model '{name}'. Check the name, or set MLFLOW_TRACKING_URI "
            "to the registry that has it."
        ) from error
    ledger = find_ledger(client, name)
    return Champions(ledger.read().decisions if ledger else ())


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
        _apply(client, name, ledger)


@explained()
def challenge(name: str, version: int) -> None:
    """Show a version as the challenger, unless a higher one is, or it has been decided about.

    The alias is for people: nothing is decided by it, and of two who set it at the same moment the
    later one wins.

    Raises:
        ModelError: there is no such version.
    """
    client = connect()
    _require_version(client, name, version)
    ledger = find_ledger(client, name)
    decisions = ledger.read().decisions if ledger else ()
    decided = any(decision.version == version for decision in decisions)
    if not decided and read_aliases(name).get(CHALLENGER, 0) < version:
        client.set_registered_model_alias(name, CHALLENGER, str(version))


@explained()
def decide(
    name: str,
    *,
    version: int,
    promote: bool,
    reasons: Sequence[str],
    by: str,
    key: str,
    after: Champions,
) -> Decision | None:
    """Promote or refuse a version that was judged against the champion of `after`.

    A version never replaces one with a higher number, which was trained later: it is refused.

    Args:
        name: the registered model.
        version: the candidate.
        promote: what the judgement says.
        reasons: what it won, or everything that speaks against it.
        by: who judged.
        key: names the attempt. If it has decided about this version, that decision is returned.
        after: the champions against which it was judged.

    Returns:
        The decision, which has been carried out; None if the champions changed after it was judged.
        Settle and judge again then.

    Raises:
        ModelError: there is no such version, or the history was deleted.
    """
    now = settle(name)
    if now.decided(key, version) or now != after:
        return now.decided(key, version)
    if promote and now.champion is not None and now.champion > version:
        promote = False
        reasons = (
            f"Version {now.champion}, which was registered after it, is champion already.",
            *reasons,
        )
    action: Action = "promoted" if promote else "refused"
    return _commit(name, now, action, version, reasons=reasons, by=by, key=key)


@explained()
def promote_by_hand(name: str, version: int, *, reason: str, by: str) -> Decision:
    """Make a version champion because a person says so, whatever the judgement and the number.

    Raises:
        ModelError: there is no such version, or it is the champion.
    """
    key = uuid4().hex
    while True:
        now = settle(name)
        if now.champion == version:
            raise ModelError(
                f"Version {version} of '{name}' is the champion already: there is nothing to do."
            )
        if made := _commit(name, now, "promoted", version, reasons=[reason], by=by, key=key):
            return made


@explained()
def roll_back(name: str, *, reason: str, by: str) -> Decision:
    """Withdraw the present champion: the one before it is champion again.

    Raises:
        ModelError: there is none to withdraw or to go back to, or another became champion just now.
    """
    key = uuid4().hex
    now = settle(name)
    withdrawn = now.champion
    if withdrawn is None:
        raise ModelError(
            f"'{name}' has no champion that could be withdrawn. Promote a version by hand: "
            f"{_promote_command(name)}"
        )
    while now.champion == withdrawn:
        _require_previous(name, now)
        made = _commit(name, now, "rolled back", withdrawn, reasons=[reason], by=by, key=key)
        if made:
            return made
        now = settle(name)
    raise ModelError(
        f"Version {withdrawn} of '{name}' was champion when you asked, and {now.champion} is now: "
        "somebody else decided meanwhile. Look at `python flows/registry.py history "
        f"{quote(name)}` and ask again if it is still needed."
    )


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
        # There is a champion then: ledger and alias would agree if there were none.
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
        at=_now(),
        key=uuid4().hex,
    )


def _commit(
    name: str,
    now: Champions,
    action: Action,
    version: int,
    *,
    reasons: Sequence[str],
    by: str,
    key: str,
) -> Decision | None:
    """Append a decision and carry it out; None if another one was appended after `now`."""
    client = connect()
    _require_version(client, name, version)
    champion = {"promoted": version, "refused": now.champion, "rolled back": now.previous}[action]
    whole = tuple(plain(reason) for reason in reasons)
    ledger = open_ledger(client, name)
    ledger.append(
        Decision(
            number=len(now.decisions) + 1,
            action=action,
            version=version,
            champion=champion,
            reasons=whole,
            by=plain(by),
            at=_now(),
            key=key,
        )
    )
    made = Champions(ledger.read().decisions).decided(key, version)
    if made is None:
        return None
    _apply(client, name, ledger)
    if made.reasons != whole:
        set_tags(client, name, version, {"promotion_reasons": "\n".join(whole)})
    return made


def _apply(client: MlflowClient, name: str, ledger: Ledger) -> None:
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


def _require_version(client: MlflowClient, name: str, version: int) -> None:
    if not exists(client, name, version):
        raise ModelError(
            f"MLflow has no version {version} of the registered model '{name}', or no longer: an "
            "alias cannot name it. Choose one that MLflow lists."
        )


def _require_previous(name: str, now: Champions) -> None:
    if now.previous is None:
        raise ModelError(
            f"Version {now.champion} of '{name}' replaced no other: there is nothing to go back "
            f"to. Promote another version by hand: {_promote_command(name)}"
        )
    if not exists(connect(), name, now.previous):
        raise ModelError(
            f"Version {now.previous} of '{name}', which was champion before {now.champion}, was "
            f"deleted in MLflow: it cannot be champion again. Promote another version by hand: "
            f"{_promote_command(name)}"
        )


def _promote_command(name: str) -> str:
    return f"`python flows/registry.py promote {quote(name)} VERSION --reason TEXT`."


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
