"""Merge preference rows into labelled pairs, each with all votes on the pair."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pipeline.inputs.rows import Labels, Row, Rows, digest_rows

LABELS: Labels = {
    "margin": (int, float),
    "tie": (bool,),
    "category": (str,),
    "source": (str,),
    "annotator": (str, int, float),
}
"""Optional columns and their types: the rating difference between the responses, whether people
prefer neither, the kind of the pair, the origin of the pair, and the id of the voter."""


_Key = tuple[str, frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class LabelledPair:
    """Two responses to a prompt, and the one that people prefer."""

    prompt: str
    """The prompt; empty if there is none."""

    chosen: str
    """The response with most votes; for a tie, the chosen response of the first row."""

    rejected: str
    """The other response."""

    margin: float | None = None
    """Mean over the rows of the chosen response's rating minus the other response's. It is negative
    if a minority preferred the other response by a large margin."""

    category: str | None = None
    """Column `category` of the first row, else column `source`."""

    tie: bool = False
    """Whether neither response is preferred, because the votes are equal, most votes are for
    neither, or the two texts are equal."""

    votes: int = 1
    """Number of people who voted."""

    agreement: float | None = None
    """Fraction of the votes that hold the most frequent opinion; None for a single vote."""


def label_pairs(rows: Sequence[Row]) -> list[LabelledPair]:
    """Merge rows with equal prompts and equal responses, in either order, into one pair.

    A row votes for its chosen response, or for neither if its `tie` is true. All rows of one
    `annotator` count as one vote, and each row without annotator counts as one vote. The most
    frequent opinion decides; if two opinions are equally frequent, the pair is a tie.

    Args:
        rows: rows with `chosen`, `rejected`, and optionally `prompt` and any of `LABELS`.

    Returns:
        The pairs in the order of their first rows.
    """
    groups: dict[_Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(_key(row), []).append(row)
    return [_merge(group) for group in groups.values()]


def without_pairs(rows: Rows, others: Rows) -> Rows:
    """Return the rows whose pairs are not in `others`, and print the number of removed rows."""
    taken = {_key(row) for row in others.usable}
    kept = [row for row in rows.usable if _key(row) not in taken]
    if left_out := len(rows.usable) - len(kept):
        print(f"{rows.source}: {left_out} rows left out, their pairs are in {others.source}")
    return replace(rows, usable=kept, digest=digest_rows(kept))


def training_texts(rows: Rows) -> Rows:
    """Return the rows for training a reward model, without ties and label columns.

    A margin would change the training loss, and a tie would teach a preference that nobody has.
    """
    texts = [
        {name: value for name, value in row.items() if name not in LABELS}
        for row in rows.usable
        if not row.get("tie")
    ]
    return replace(rows, usable=texts, digest=digest_rows(texts))


def _key(row: Row) -> _Key:
    return row.get("prompt", ""), frozenset((row["chosen"], row["rejected"]))


def _merge(rows: Sequence[Row]) -> LabelledPair:
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
    return LabelledPair(
        prompt=first.get("prompt", ""),
        chosen=first["chosen" if side > 0 else "rejected"],
        rejected=first["rejected" if side > 0 else "chosen"],
        margin=fmean(margins) if margins else None,
        category=first.get("category") or first.get("source"),
        tie=winner == 0 or first["chosen"] == first["rejected"],
        votes=len(votes),
        agreement=counts[0][1] / len(votes) if len(votes) > 1 else None,
    )


def _votes(rows: Sequence[Row], signs: Sequence[int]) -> list[int]:
    """Return each person's vote: 1 for the first row's chosen response, -1 for the other, or 0."""
    opinions: dict[object, int] = {}
    for number, (row, sign) in enumerate(zip(rows, signs, strict=True)):
        annotator = row.get("annotator")
        person = ("row", number) if annotator is None else annotator
        opinions[person] = opinions.get(person, 0) + (0 if row.get("tie") else sign)
    return [(total > 0) - (total < 0) for total in opinions.values()]
