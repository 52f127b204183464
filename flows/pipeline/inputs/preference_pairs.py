"""What people said of pairs of responses: one record a pair, however many voted on it."""

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
"""What preferences may say beside their texts: how much better people rated the chosen response,
that they saw no difference, what kind of pair it is or where it comes from, and who voted."""


_Key = tuple[str, frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class LabelledPair:
    """Two responses to a prompt, and which of them people prefer."""

    prompt: str
    """The prompt; empty if there is none."""

    chosen: str
    """The response that most votes prefer; of a tie, the one that its first row calls chosen."""

    rejected: str
    """The other one."""

    margin: float | None = None
    """How much better people rated the chosen response, the mean of its rows; below 0 where a few
    voted the other way by much."""

    category: str | None = None
    """The column `category` of its first row, else its `source`."""

    tie: bool = False
    """Whether neither is preferred: as many votes for both, most of them for neither, or twice
    the same text."""

    votes: int = 1
    """People who voted, each counted once."""

    agreement: float | None = None
    """Share of the votes that the most frequent opinion got; None for a single vote."""


def label_pairs(rows: Sequence[Row]) -> list[LabelledPair]:
    """One pair for all rows with the same prompt and the same two texts, in either order.

    Each row is a vote for its chosen response, or for neither if its `tie` is true. Rows of one
    `annotator` are one vote; a row without is somebody's own. The most frequent opinion decides;
    if two are equally frequent, the pair is a tie.

    Args:
        rows: `chosen`, `rejected`, perhaps `prompt` and any of `LABELS`.

    Returns:
        The pairs, in the order in which they first occur.
    """
    groups: dict[_Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(_key(row), []).append(row)
    return [_merge(group) for group in groups.values()]


def without_pairs(rows: Rows, others: Rows) -> Rows:
    """The rows whose pair is none of the others' pairs; prints how many are left out."""
    taken = {_key(row) for row in others.usable}
    kept = [row for row in rows.usable if _key(row) not in taken]
    if left_out := len(rows.usable) - len(kept):
        print(f"{rows.source}: {left_out} rows left out, their pairs are in {others.source}")
    return replace(rows, usable=kept, digest=digest_rows(kept))


def training_texts(rows: Rows) -> Rows:
    """What a reward model is trained on: the texts of rows that are no ties, without labels.

    A row's margin would change the loss of its training, and a tie would teach a preference that
    nobody has.
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
    # 1 for a row in the order of the first, -1 for one in the other.
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
    """1 for each person who prefers the first row's chosen response, -1 the other, 0 neither."""
    opinions: dict[object, int] = {}
    for number, (row, sign) in enumerate(zip(rows, signs, strict=True)):
        annotator = row.get("annotator")
        person = ("row", number) if annotator is None else annotator
        opinions[person] = opinions.get(person, 0) + (0 if row.get("tie") else sign)
    return [(total > 0) - (total < 0) for total in opinions.values()]
