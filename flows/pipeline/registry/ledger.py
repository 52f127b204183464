"""The history of the decisions on a registered model, to which nobody can append unseen.

MLflow's aliases have no compare-and-swap: of two who set one, the later overwrites the earlier and
neither learns of it. A parameter of a run is safer. Its key is a primary key of the database, so of
two different values the server takes one and refuses the other, while the same value again is no
error. So the decisions are the parameters 0001, 0002, ... of one run, and who appends number n + 1
has seen all n before it: a compare-and-append, which a request that is sent twice does not double.

A decision is first appended, then carried out (aliases and tags follow it), then marked by the
parameter "0001 applied". One without that mark was interrupted: anybody can carry it out again.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args
from uuid import uuid4

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from pipeline.tracking.mlflow_client import MAX_PARAM_CHARACTERS
from ppo_core.errors import ConfigError, ModelError

Action = Literal["promoted", "refused", "rolled back", "found"]

MAX_TAG_CHARACTERS = 8000
MAX_NAME_CHARACTERS = 250
CUT = " [cut]"
"""Ends a text that was longer than what MLflow takes."""

RUN_TAG = "decisions_run"
"""Tag of the experiment: id of the run that holds the decisions."""

NOTE = "mlflow.note.content"
"""Tag of a run that MLflow shows as its description, in Markdown."""

_MARKDOWN = re.compile(r"[\\`*_{}\[\]<>()#+!|~&]")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Something that was decided on the champion of a registered model."""

    number: int
    """From 1, without gaps."""

    action: Action
    """`found` is a change that somebody made to the alias in MLflow itself."""

    version: int
    """The version it is about: the one promoted, refused, found, or withdrawn."""

    champion: int | None
    """The champion from then on; None if there is none."""

    reasons: tuple[str, ...]
    """Why: what a version won, or everything that speaks against it."""

    by: str
    """Who decided: "run RLHF/123" or "person USER"."""

    at: str
    """When, ISO 8601 in UTC."""

    key: str
    """Names the attempt to decide: a second attempt with the same key is the same decision."""

    def __post_init__(self) -> None:
        """Refuse what would leave no room for reasons, which alone can be cut."""
        for name in ("by", "key"):
            if len(value := getattr(self, name)) > MAX_NAME_CHARACTERS:
                raise ConfigError(
                    f"{name}={value[:50]!r}... has {len(value)} characters; a decision has room "
                    f"for {MAX_NAME_CHARACTERS}. Choose a shorter one."
                )


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
    experiment = _create_experiment(client, f"{_title(name)}, unfinished {uuid4().hex}")
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


def encode(decision: Decision) -> str:
    """A decision as one line of JSON that MLflow takes whole; reasons that are too long are cut."""
    line = _json(decision)
    text = "\n".join(decision.reasons)
    while len(line) > MAX_PARAM_CHARACTERS:
        text = shortened(text, len(text) * 9 // 10)
        line = _json(replace(decision, reasons=tuple(text.split("\n"))))
    return line


def decode(number: int, line: str) -> Decision:
    """The decision that `encode` wrote.

    Raises:
        ModelError: it was written by something else.
    """
    try:
        fields = json.loads(line)
        decision = Decision(**{**fields, "reasons": tuple(fields["reasons"])})
        if decision.number != number or decision.action not in get_args(Action):
            raise ValueError(f"number {decision.number}, action {decision.action!r}")
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"Decision {number} of the history cannot be read ({error}): {line[:200]!r}. It was "
            "written by hand or by another release; go on with the release that wrote it."
        ) from error
    return decision


def plain(text: str) -> str:
    """A text as one line that every database, terminal and page can hold.

    Characters that cannot be printed (control characters, halves of surrogate pairs) are spaces.
    """
    return "".join(character if character.isprintable() else " " for character in text).strip()


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters of a text; one that was cut says so."""
    return text if len(text) <= limit else text[: limit - len(CUT)] + CUT


def as_markdown(decisions: Sequence[Decision]) -> str:
    """The history as a table, the newest first, as much of it as a tag holds."""
    lines = ["| # | when | what | version | champion | by | why |", "|---|---|---|---|---|---|---|"]
    room = MAX_TAG_CHARACTERS - sum(len(line) + 1 for line in lines) - 100
    for decision in reversed(decisions):
        row = _row(decision)
        if len(row) + 1 > room:
            lines.append(f"\n{decision.number} older decisions are in the parameters of this run.")
            break
        lines.append(row)
        room -= len(row) + 1
    return "\n".join(lines)


def _create_experiment(client: MlflowClient, title: str) -> str:
    """The id of a new experiment, also where MLflow's client asked again after a lost reply."""
    try:
        return client.create_experiment(title)
    except MlflowException:
        made = client.get_experiment_by_name(title)
        if made is None:
            raise
        return made.experiment_id


def _json(decision: Decision) -> str:
    return json.dumps(asdict(decision), ensure_ascii=False)


def _row(decision: Decision) -> str:
    cells = [
        str(decision.number),
        decision.at,
        decision.action,
        str(decision.version),
        str(decision.champion or "none"),
        decision.by,
        shortened(" ".join(decision.reasons), 300),
    ]
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    """Characters that Markdown or HTML could take for markup as numbers, which none does."""
    return _MARKDOWN.sub(lambda found: f"&#{ord(found[0])};", plain(text))


def _key(number: int) -> str:
    return f"{number:04d}"


def _title(name: str) -> str:
    return f"promotions of {name}"
