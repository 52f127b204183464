"""Merge preference rows into labeled pairs, each with all votes on the pair."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean

import pyarrow
from datasets import concatenate_datasets

from ppo_core.data.chat_template import Messages
from ppo_core.data.rows.reader import Rows, derive, each
from ppo_core.data.rows.row_formats import WEIGHT, Row
from ppo_core.errors import DataError
from ppo_core.io.folder_cache import digest_of, digest_of_code

JUDGE_PART = 3
"""If no judge is named, one of every `JUDGE_PART` different pairs trains the judge."""

_TRAINED = ("prompt", "chosen", "rejected")

_MARGIN = "margin"

_Key = tuple[str, frozenset[str]]


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
    """Mean over the rows of the chosen response's rating minus the other response's rating; None if
    no row has a margin. The mean is negative if a minority preferred the other response by a large
    margin."""

    category: str | None = None
    """Column `category` of the first row, or column `source` if the category is empty."""

    tie: bool = False
    """Whether neither response is preferred, because the votes are equal, most votes are ties,
    or the two texts are equal."""

    votes: int = 1
    """Number of people who voted."""

    agreement: float | None = None
    """Fraction of the votes for the most frequent opinion; None for a single vote."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """A person's opinion on two answers to a prompt."""

    prompt: str | Messages
    first: str
    second: str

    label: str
    """`first`, `second` or `tie`; `first` means that the first answer is better."""

    annotator: str | None = None
    """Id of the person; None if it is not known."""

    @property
    def chosen(self) -> str:
        """The preferred answer; for a tie, the first one."""
        return self.second if self.label == "second" else self.first

    @property
    def rejected(self) -> str:
        """The other answer."""
        return self.first if self.label == "second" else self.second

    @classmethod
    def of(cls, row: Row) -> "Vote":
        """Return the vote of a row of the kind `votes`."""
        return cls(**{one.name: row[one.name] for one in fields(cls) if one.name in row})


def votes_of(rows: Iterable[Row] | None) -> list[Vote]:
    """Return the votes of rows of the kind `votes`; an empty list if `rows` is None."""
    return [Vote.of(row) for row in rows or ()]


def unlabeled_rows(pairs: Iterable[tuple[str | Messages, str, str]]) -> list[Row]:
    """Return rows for people to label: a prompt, two answers, and an empty label."""
    return [
        {"prompt": prompt, "first": first, "second": second, "label": ""}
        for prompt, first, second in pairs
    ]


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
    groups: dict[_Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(_key(row), []).append(row)
    return [_merge(group) for group in groups.values()]


def training_pairs_of(rows: Rows, others: Rows) -> Rows:
    """Return the pairs for training a reward model: prompt, chosen and rejected.

    Pairs that are in `others` are left out. Ties are left out too: they would teach a preference
    that nobody has. All other columns are removed, because a margin would change the training loss.

    Raises:
        DataError: no pair is left.
    """

    def convert(row: Row) -> Row | None:
        if row.get("tie") or _key(row) in taken:
            return None
        return {name: row[name] for name in _TRAINED}

    taken = {_key(row) for row in others}
    types = rows.table.features.arrow_schema
    schema = pyarrow.schema([types.field(name) for name in _TRAINED])
    inputs = {"others": others.digest, "code": digest_of_code(__name__)}
    kept = derive(rows, "training-pairs", inputs, each(convert), schema)
    if not len(kept):
        raise DataError(
            f"{rows.source}: no pair is left to train the reward model on after ties and "
            "validation pairs are removed. Add more preferences."
        )
    if gone := len(rows) - len(kept):
        return replace(kept, source=f"{rows.source}, less {gone} that are ties or held out")
    return kept


def split_off_judge_pairs(rows: Rows) -> tuple[Rows, Rows]:
    """Return the pairs that train PPO's reward model, and the pairs that train the judge.

    Every third different pair trains the judge. Rows with equal prompts and equal responses, in
    either order, are one pair, so they are in the same part.

    Raises:
        DataError: there are fewer than three different pairs.
    """
    parts = [_part(rows, name) for name in ("reward model", "judge")]
    if not all(map(len, parts)):
        raise DataError(
            f"{rows.source}: {len(rows)} training rows contain fewer than {JUDGE_PART} different "
            "pairs. Every third pair trains the judge. Add preferences, or name a judge."
        )
    return parts[0], parts[1]


def pairs_of_votes(votes: Rows) -> Rows:
    """Return votes on two answers, `first` and `second`, as pairs; the column `tie` marks ties."""

    def convert(row: Row) -> Row:
        vote = Vote.of(row)
        return {
            "prompt": vote.prompt,
            "chosen": vote.chosen,
            "rejected": vote.rejected,
            "tie": vote.label == "tie",
            "annotator": vote.annotator,
        }

    prompt = votes.table.features.arrow_schema.field("prompt")
    names = ("chosen", "rejected", "annotator")
    texts = [pyarrow.field(name, pyarrow.string()) for name in names]
    schema = pyarrow.schema([prompt, *texts, pyarrow.field("tie", pyarrow.bool_())])
    return derive(votes, "voted-pairs", {"code": digest_of_code(__name__)}, each(convert), schema)


def pairs_of_feedback(feedback: Rows, others: Sequence[Rows]) -> Rows:
    """Return feedback as training pairs; in a judgment of one response, the other one is None.

    Pairs that are in `others` are left out.

    A missing response has a score of 0. So the loss of a judgment is the binary cross-entropy of
    sigmoid(score + c), where c is the log odds of a positive judgment among the weighted rows. Then
    an answer with score 0 has the average probability of a positive judgment. c is 0 if all
    judgments are equal.
    """
    liked = disliked = 0.0
    for row in feedback:
        liked += row[WEIGHT] * (row["rejected"] is None)
        disliked += row[WEIGHT] * (row["chosen"] is None)
    log_odds = math.log(liked / disliked) if liked and disliked else 0.0

    taken = {_key(row) for rows in others for row in rows}

    def convert(row: Row) -> Row | None:
        if _key(row) in taken:
            return None
        margin = log_odds * ((row["chosen"] is None) - (row["rejected"] is None))
        return {name: row[name] for name in (*_TRAINED, WEIGHT)} | {_MARGIN: margin}

    types = feedback.table.features.arrow_schema
    fields = [types.field(name) for name in (*_TRAINED, WEIGHT)]
    schema = pyarrow.schema([*fields, pyarrow.field(_MARGIN, pyarrow.float64())])
    inputs = {"others": [rows.digest for rows in others], "code": digest_of_code(__name__)}
    return derive(feedback, "pairs-of-feedback", inputs, each(convert), schema)


def decided_pairs(pairs: Iterable[Row], trained: Sequence[Rows]) -> list[LabeledPair]:
    """Return the pairs in which people prefer one answer, without the pairs of `trained`."""
    taken = {_key(row) for rows in trained for row in rows}
    kept = label_pairs(row for row in pairs if _key(row) not in taken)
    return [pair for pair in kept if not pair.tie]


def join_by_weight(parts: Sequence[tuple[Rows, float]]) -> Rows:
    """Return the pairs of several data sets; each pair has the weight of its data set.

    A single data set is returned unchanged.
    """
    if len(parts) == 1:
        return parts[0][0]
    weighted = [_with_weight(*part) for part in parts]
    return replace(
        weighted[0],
        source=" and ".join(f"{rows.source} (weight {weight:g})" for rows, weight in parts),
        table=concatenate_datasets([rows.table for rows in weighted]),
        digest=digest_of([rows.digest for rows in weighted]),
        key=digest_of([rows.key for rows in weighted]),
        left_out={},
        left_out_files=(),
    )


def _with_weight(rows: Rows, weight: float) -> Rows:
    """Multiply the weight of each row by `weight`; rows without weights get the margin 0."""
    is_weighted = WEIGHT in rows.table.column_names

    def convert(row: Row) -> Row:
        margin, factor = (row[_MARGIN], row[WEIGHT]) if is_weighted else (0.0, 1.0)
        return {name: row[name] for name in _TRAINED} | {_MARGIN: margin, WEIGHT: weight * factor}

    types = rows.table.features.arrow_schema
    numbers = [pyarrow.field(name, pyarrow.float64()) for name in (_MARGIN, WEIGHT)]
    schema = pyarrow.schema([*(types.field(name) for name in _TRAINED), *numbers])
    inputs = {"weight": weight, "code": digest_of_code(__name__)}
    return derive(rows, "weighted-pairs", inputs, each(convert), schema)


def _part(rows: Rows, name: str) -> Rows:
    numbers: dict[_Key, int] = {}

    def convert(row: Row) -> Row | None:
        number = numbers.setdefault(_key(row), len(numbers))
        is_judges = number % JUDGE_PART == JUDGE_PART - 1
        return {field: row[field] for field in _TRAINED} if is_judges == (name == "judge") else None

    inputs = {"part": name, "code": digest_of_code(__name__)}
    kept = derive(rows, "pairs-of-one-model", inputs, each(convert))
    return replace(kept, source=f"{rows.source} (for the {name})")


def _key(row: Row) -> _Key:
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
