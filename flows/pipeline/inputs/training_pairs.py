"""Choose and weight the pairs that train a reward model or a judge."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pyarrow
from datasets import concatenate_datasets

from pipeline.inputs.labeled_pairs import PairKey, pair_key
from pipeline.inputs.training_prompts import prompt_groups
from ppo_core.data.rows.read_rows import Rows, derive, each
from ppo_core.data.rows.row_columns import WEIGHT, Row
from ppo_core.data.rows.split_rows import held_out, reports_left_out
from ppo_core.errors import DataError
from ppo_core.io.folder_cache import digest_of, digest_of_code

JUDGE_PART = 3
"""If no judge is named, one of every `JUDGE_PART` different pairs trains the judge."""

PAIR_FIELDS = ("prompt", "chosen", "rejected")
"""Fields of a pair that trains a model."""

MARGIN = "margin"
"""Optional field: number that the loss subtracts from the difference of the scores."""


def training_pairs_of(rows: Rows, others: Rows) -> Rows:
    """Return the pairs for training a reward model: prompt, chosen and rejected.

    Pairs that are in `others` are left out. Ties are left out too: they would teach a preference
    that nobody has. A pair of equal responses is a tie. All other columns are removed, because a
    margin would change the training loss.

    Raises:
        DataError: no pair is left.
    """

    def convert(row: Row) -> Row | None:
        is_tie = row.get("tie") or row["chosen"] == row["rejected"]
        if is_tie or pair_key(row) in taken:
            return None
        return {name: row[name] for name in PAIR_FIELDS}

    taken = {pair_key(row) for row in others}
    types = rows.table.features.arrow_schema
    schema = pyarrow.schema([types.field(name) for name in PAIR_FIELDS])
    inputs = {"others": others.digest, "code": _code()}
    kept = derive(rows, "training-pairs", inputs, each(convert), schema)
    if not len(kept):
        raise DataError(
            f"{rows.source}: no pair is left to train the reward model on after ties and "
            "validation pairs are removed. Add more preferences."
        )
    if gone := len(rows) - len(kept):
        return replace(kept, source=f"{rows.source}, less {gone} that are ties or held out")
    return kept


def held_out_pairs(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Split off about the last fraction `share` of the pairs, so that no prompt is in both parts.

    If a prompt has pairs in both parts of `held_out`, prompts are split off in the order of their
    first pairs, the last first. So a prompt that trained a model stays in the first part if later
    data sets add pairs to it. A prompt whose pairs do not all fit into the share stays there, too.
    A pair without a prompt shares its prompt with no other pair. If all rows have the same prompt,
    the result is that of `held_out`.

    Raises:
        DataError: see `held_out`.
    """
    first, last = held_out(rows, share)
    prompts = prompt_groups(rows.column("prompt"))
    counts = Counter(prompts)
    if len(counts) == 1 or not {*prompts[: len(first)]} & {*prompts[len(first) :]}:
        return first, last
    taken, number = set[int](), 0
    for prompt in reversed(dict.fromkeys(prompts)):
        if number + counts[prompt] <= share * len(rows):
            taken.add(prompt)
            number += counts[prompt]
    taken = taken or {min(counts, key=lambda prompt: counts[prompt])}
    parts: tuple[list[int], list[int]] = ([], [])
    for position, prompt in enumerate(prompts):
        parts[prompt in taken].append(position)
    kept, split_off = (
        rows.select(part, f"{len(part)} of {len(rows)}, no prompt in both parts") for part in parts
    )
    return reports_left_out(kept, rows), split_off


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


def join_by_weight(parts: Sequence[tuple[Rows, float]]) -> Rows:
    """Return the pairs of several data sets; each pair has the weight of its data set.

    A single data set is returned unchanged.
    """
    if len(parts) == 1:
        return parts[0][0]
    weighted = [_with_weight(*part) for part in parts]
    return replace(
        weighted[0].without_left_out(),
        source=" and ".join(f"{rows.source} (weight {weight:g})" for rows, weight in parts),
        table=concatenate_datasets([rows.table for rows in weighted]),
        digest=digest_of([rows.digest for rows in weighted]),
        key=digest_of([rows.key for rows in weighted]),
    )


def _with_weight(rows: Rows, weight: float) -> Rows:
    """Multiply the weight of each row by `weight`; unweighted rows have weight 1 and margin 0."""
    is_weighted = WEIGHT in rows.table.column_names

    def convert(row: Row) -> Row:
        margin, factor = (row[MARGIN], row[WEIGHT]) if is_weighted else (0.0, 1.0)
        return {name: row[name] for name in PAIR_FIELDS} | {MARGIN: margin, WEIGHT: weight * factor}

    types = rows.table.features.arrow_schema
    numbers = [pyarrow.field(name, pyarrow.float64()) for name in (MARGIN, WEIGHT)]
    schema = pyarrow.schema([*(types.field(name) for name in PAIR_FIELDS), *numbers])
    inputs = {"weight": weight, "code": _code()}
    return derive(rows, "weighted-pairs", inputs, each(convert), schema)


def _part(rows: Rows, name: str) -> Rows:
    numbers: dict[PairKey, int] = {}

    def convert(row: Row) -> Row | None:
        number = numbers.setdefault(pair_key(row), len(numbers))
        is_judges = number % JUDGE_PART == JUDGE_PART - 1
        if is_judges != (name == "judge"):
            return None
        return {field: row[field] for field in PAIR_FIELDS}

    inputs = {"part": name, "code": _code()}
    kept = derive(rows, "pairs-of-one-model", inputs, each(convert))
    return replace(kept, source=f"{rows.source} (for the {name})")


def _code() -> str:
    """Return a digest of the code that decides which pairs are equal and which are kept."""
    return digest_of_code(__name__, "pipeline.inputs.labeled_pairs")
