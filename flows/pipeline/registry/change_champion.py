"""Promote a version of a registered model to champion, refuse it, or withdraw the champion."""

from collections.abc import Sequence
from shlex import quote
from uuid import uuid4

from mlflow import MlflowClient

from pipeline.registry.aliases import (
    CHALLENGER,
    exists,
    read_aliases,
    require_registered,
    set_alias,
    set_tags,
)
from pipeline.registry.champion_history import Champions
from pipeline.registry.decisions import Action, Decision, plain, timestamp
from pipeline.registry.ledger import find_ledger, open_ledger
from pipeline.registry.sync_aliases import apply_decisions, sync_aliases
from pipeline.tracking.mlflow_client import connect, explained
from ppo_core.errors import ModelError
from serving.manifest import MANIFEST_TAG


@explained()
def read_champions(name: str) -> Champions:
    """Return the champions according to the ledger; change nothing.

    Raises:
        ModelError: there is no such registered model, or its ledger was deleted.
    """
    require_registered(name)
    return Champions(read_decisions(name))


@explained()
def read_decisions(name: str) -> tuple[Decision, ...]:
    """Return the decisions on a registered model; none before the first. Change nothing.

    Raises:
        ModelError: the ledger was deleted.
    """
    ledger = find_ledger(connect(), name)
    return ledger.read().decisions if ledger else ()


@explained()
def challenge(name: str, version: int) -> None:
    """Point the alias `challenger` at a version.

    Do nothing if there is already a decision on the version, or if the present challenger is newer.
    The alias only informs people; no decision depends on it.

    Raises:
        ModelError: there is no such version.
    """
    client = connect()
    _require_version(client, name, version)
    decided = any(decision.version == version for decision in read_decisions(name))
    if not decided and read_aliases(name).get(CHALLENGER, 0) < version:
        set_alias(client, name, CHALLENGER, version)


@explained()
def record_decision(
    name: str,
    *,
    version: int,
    promote: bool,
    reasons: Sequence[str],
    by: str,
    key: str,
    after: Champions,
) -> Decision | None:
    """Promote or refuse a version that was compared with the champion of `after`.

    A version is always refused if the champion has a higher number and is therefore newer.

    Args:
        name: the registered model.
        version: the candidate.
        promote: whether the comparison favors the promotion.
        reasons: reasons for the promotion, or all reasons against it.
        by: run or person that decides.
        key: id of the attempt. An existing decision with this key and version is returned.
        after: champions at the time of the comparison.

    Returns:
        The decision, which has been carried out; None if the champions have changed since `after`.
        In that case, call `sync_aliases` and compare again.

    Raises:
        ModelError: there is no such version, or the ledger was deleted.
    """
    now = sync_aliases(name)
    if now.decided(key, version) or now != after:
        return now.decided(key, version)
    if promote and now.champion is not None and now.champion > version:
        promote = False
        reasons = (
            f"Version {now.champion}, which was registered later, is already champion.",
            *reasons,
        )
    action: Action = "promoted" if promote else "refused"
    return _commit(name, now, action, version, reasons=reasons, by=by, key=key)


@explained()
def promote_by_hand(name: str, version: int, *, reason: str, by: str) -> Decision:
    """Promote a version because a person decided so, regardless of its results and its number.

    Raises:
        ModelError: the version does not exist, has no manifest, or is already the champion.
    """
    _require_manifest(name, version)
    key = uuid4().hex
    while True:
        now = sync_aliases(name)
        if now.champion == version:
            raise ModelError(
                f"Version {version} of '{name}' is the champion already: there is nothing to do."
            )
        if made := _commit(name, now, "promoted", version, reasons=[reason], by=by, key=key):
            return made


@explained()
def roll_back(name: str, *, reason: str, by: str, champion: int | None = None) -> Decision:
    """Withdraw the champion, and make the previous champion the champion again.

    If `champion` is given, only this version is withdrawn.

    Raises:
        ModelError: there is no champion or no previous champion, or the champion has just changed.
    """
    key = uuid4().hex
    now = sync_aliases(name)
    withdrawn = now.champion if champion is None else champion
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
        now = sync_aliases(name)
    present = "no version" if now.champion is None else f"version {now.champion}"
    raise ModelError(
        f"The champion of '{name}' changed from version {withdrawn} to {present} after your "
        "request, so nothing was withdrawn. Read `python flows/registry.py history "
        f"{quote(name)}`, and repeat the request if it is still needed."
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
    """Append a decision and carry it out; return None if another decision was made since `now`."""
    client = connect()
    _require_version(client, name, version)
    champion = {"promoted": version, "refused": now.champion, "rolled back": now.previous}[action]
    full_reasons = tuple(plain(reason) for reason in reasons)
    ledger = open_ledger(client, name)
    ledger.append(
        Decision(
            number=len(now.decisions) + 1,
            action=action,
            version=version,
            champion=champion,
            reasons=full_reasons,
            by=plain(by),
            at=timestamp(),
            key=key,
        )
    )
    made = Champions(ledger.read().decisions).decided(key, version)
    if made is None:
        return None
    apply_decisions(client, name, ledger)
    if made.reasons != full_reasons:
        set_tags(client, name, version, {"promotion_reasons": "\n".join(full_reasons)})
    return made


def _require_version(client: MlflowClient, name: str, version: int) -> None:
    if not exists(client, name, version):
        raise ModelError(
            f"The registered model '{name}' has no version {version}, or this version was deleted. "
            "Choose a version that MLflow lists."
        )


def _require_manifest(name: str, version: int) -> None:
    client = connect()
    _require_version(client, name, version)
    if MANIFEST_TAG not in client.get_model_version(name, str(version)).tags:
        raise ModelError(
            f"Version {version} of '{name}' has no tag '{MANIFEST_TAG}', because this flow did not "
            "register it. Its files cannot be verified, so services and the next run would refuse "
            "this champion. To serve these weights, name them as `policy` of a run."
        )


def _require_previous(name: str, now: Champions) -> None:
    if now.previous is None:
        raise ModelError(
            f"Version {now.champion} of '{name}' replaced no other version, so no version can "
            f"become champion again. Promote another version by hand: {_promote_command(name)} "
            "To leave production without a champion, delete the alias champion in MLflow."
        )
    if not exists(connect(), name, now.previous):
        raise ModelError(
            f"Version {now.previous} of '{name}', which was champion before {now.champion}, was "
            f"deleted in MLflow: it cannot be champion again. Promote another version by hand: "
            f"{_promote_command(name)}"
        )


def _promote_command(name: str) -> str:
    return f"`python flows/registry.py promote {quote(name)} VERSION --reason TEXT`."
