"""Decisions on the champion; each is written as a line of JSON and as a Markdown table row."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from pipeline.tracking.mlflow_facts import MAX_PARAM_CHARACTERS, MAX_TAG_CHARACTERS
from ppo_core.errors import ConfigError, ModelError
from ppo_core.io.text_files import parse_strict_json
from ppo_core.io.validation import read_record
from ppo_core.reporting import escaping

Action = Literal["promoted", "refused", "rolled back", "found"]

MAX_NAME_CHARACTERS = 250
CUT_MARK = " [cut]"
"""Mark at the end of a text that was cut to MLflow's maximum length."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A decision on the champion of a registered model."""

    number: int
    """Number of the decision, counted from 1 without gaps."""

    action: Action
    """Type of the decision; `found` records that somebody moved the champion's alias in MLflow."""

    version: int
    """Version that was promoted, refused, found or withdrawn."""

    champion: int | None
    """Champion after the decision; None if there is no champion."""

    reasons: tuple[str, ...]
    """Reasons for the decision, as sentences."""

    by: str
    """Run or person that decided, such as "run RLHF/123" or "person USER"."""

    at: str
    """Time of the decision, ISO 8601 in UTC."""

    key: str
    """Id of the attempt; a repeated attempt with the same key makes no second decision."""

    @property
    def is_of_run(self) -> bool:
        """Whether the promotion gate of a run decided.

        Otherwise a person decided, a person moved the champion's alias in MLflow, or `retrain`
        withdrew a champion that users like less than the previous champion.
        """
        return self.by.startswith("run ") and self.action in ("promoted", "refused")

    @property
    def is_promoted(self) -> bool:
        """Whether the version is champion after the decision, also if a person promoted it."""
        return self.champion == self.version

    def __post_init__(self) -> None:
        """Raise if `by` or `key` is too long; only the reasons may be cut."""
        for name in ("by", "key"):
            if len(value := getattr(self, name)) > MAX_NAME_CHARACTERS:
                raise ConfigError(
                    f"{name}={value[:50]!r}... has {len(value)} characters; a decision has room "
                    f"for {MAX_NAME_CHARACTERS}. Choose a shorter one."
                )


def timestamp() -> str:
    """Return the present time in UTC as ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def encode(decision: Decision) -> str:
    """Return a decision as one line of JSON; reasons are cut to MLflow's maximum length."""
    line = _json(decision)
    text = "\n".join(decision.reasons)
    while len(line) > MAX_PARAM_CHARACTERS:
        text = shortened(text, len(text) * 9 // 10)
        line = _json(replace(decision, reasons=tuple(text.split("\n"))))
    return line


def decode(number: int, line: str) -> Decision:
    """Parse a line that `encode` wrote; `number` is the expected number of the decision.

    Raises:
        ModelError: `encode` did not write the line.
    """
    try:
        decision = read_record(parse_strict_json(line), Decision, extra="forbid")
        if decision.number != number:
            raise ValueError(f"its number is {decision.number}")
    except ValueError as error:
        raise ModelError(
            f"Decision {number} of the history cannot be read ({error}): {line[:200]!r}. Another "
            "release or a person wrote it. If it was a release, continue with that release."
        ) from error
    return decision


def plain(text: str) -> str:
    """Return a text as one printable line without spaces at its ends."""
    return escaping.one_line(text).strip()


def shortened(text: str, limit: int, mark: str = CUT_MARK) -> str:
    """Return at most `limit` characters of a text; `mark` ends a text that was cut."""
    return text if len(text) <= limit else text[: limit - len(mark)] + mark


def as_markdown(decisions: Sequence[Decision]) -> str:
    """Return the history as a Markdown table, newest first, cut to the maximum length of a tag."""
    lines = ["| # | when | what | version | champion | by | why |", "|---|---|---|---|---|---|---|"]
    capacity = MAX_TAG_CHARACTERS - sum(len(line) + 1 for line in lines) - 100
    for decision in reversed(decisions):
        row = _row(decision)
        if len(row) + 1 > capacity:
            lines.append(f"\n{decision.number} older decisions are in the parameters of this run.")
            break
        lines.append(row)
        capacity -= len(row) + 1
    return "\n".join(lines)


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
    return f"| {' | '.join(escaping.as_markdown(plain(cell)) for cell in cells)} |"
