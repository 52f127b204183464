"""Merge preference rows into labeled pairs, each with all votes on the pair."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ppo_core.data.chat_template import Messages
from ppo_core.data.rows.read_rows import Rows
from ppo_core.data.rows.row_columns import Row

PairKey = tuple[str, frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class LabeledPair:
    """Two responses to a prompt, and which of them people prefer."""

    prompt: str | Messages
    """The prompt; empty if there is none."""

    chosen: str
    """The response with most votes; for a tie, the chosen response of the first row."""

    rejected: str
    """The other response."""

    margin: float | None = None
    """Rating of the chosen response minus rating of the other response, as a mean over the rows;
    None if no row has a margin. The mean is negative if a minority preferred the other response by
    a large margin."""

    category: str | None = None
    """Column `category` of the first row, or column `source` if the category is empty."""

    tie: bool = False
    """Whether neither response is preferred, because the votes are equal, most votes are ties,
    or the two texts are equal."""

    votes: int = 1
    """Number of people who voted."""

    agreement: float | None = None
    """Fraction of the votes that have the most frequent opinion; None for a single vote."""


def label_pairs(rows: Iterable[Row]) -> list[LabeledPair]:
    """Merge rows with equal prompts and equal responses, in either order, into one pair.

    A row votes for its chosen response, or for neither response if its `tie` is true. All rows of
    one `annotator` count as one vote; each row without annotator counts as one vote. The most
    frequent opinion decides; if two opinions are equally frequent, the pair is a tie.

    Args:
        rows: rows with `prompt`, `chosen`, `rejected`, and optionally the fields of `LABEL_FIELDS`.

    Returns:
        The pairs in the order of their first rows.
    """
    groups: dict[PairKey, list[Row]] = {}
    for row in rows:
        groups.setdefault(pair_key(row), []).append(row)
    return [_merge(group) for group in groups.values()]


def decided_pairs(pairs: Iterable[Row], trained: Sequence[Rows]) -> list[LabeledPair]:
    """Return the pairs in which people prefer one answer, without the pairs of `trained`."""
    taken = {pair_key(row) for rows in trained for row in rows}
    kept = label_pairs(row for row in pairs if pair_key(row) not in taken)
    return [pair for pair in kept if not pair.tie]


def example_pair(rows: Iterable[Row]) -> LabeledPair:
    """Return the first pair in which people prefer a response; if there is none, the first pair."""
    pairs = label_pairs(rows)
    return next((pair for pair in pairs if not pair.tie), pairs[0])


def pair_key(row: Row) -> PairKey:
    """Return a key that is equal for rows with equal prompts and responses, in either order."""
    return json.dumps(row["prompt"]), frozenset((row["chosen"], row["rejected"]))


def _merge(rows: Sequence[Row]) -> LabeledPair:
    first = rows[0]
    # 1 for a row in the order of the first row, -1 for a row in the other order.
    signs = [1 if row["chosen"] == first["chosen"] else -1 for row in rows]
    votes = _votes(rows, signs)
    counts = Counter(votes).most_common()
    winner = counts[0][0] if len(counts) == 1 or counts[0][1] > counts[1][1] else 0
    side = -1 if winner < 0 else 1
    margins = [
        side * sign * row["margin"]
        for row, sign in zip(rows, signs, strict=True)
        if row.get("margin") is not None
    ]
    return LabeledPair(
        prompt=first["prompt"],
        chosen=first["chosen" if side > 0 else "rejected"],
        rejected=first["rejected" if side > 0 else "chosen"],
        margin=fmean(margins) if margins else None,
        category=first.get("category") or first.get("source"),
        tie=winner == 0 or first["chosen"] == first["rejected"],
        votes=len(votes),
        agreement=counts[0][1] / len(votes) if len(votes) > 1 else None,
    )


def _votes(rows: Sequence[Row], signs: Sequence[int]) -> list[int]:
    """Return the votes: 1 for the first row's chosen response, -1 for its rejected one, or 0."""
    opinions: dict[object, int] = {}
    for number, (row, sign) in enumerate(zip(rows, signs, strict=True)):
        annotator = row.get("annotator")
        person = ("row", number) if annotator is None else annotator
        opinions[person] = opinions.get(person, 0) + (0 if row.get("tie") else sign)
    return [(total > 0) - (total < 0) for total in opinions.values()]
