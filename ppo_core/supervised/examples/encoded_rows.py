"""Encode the rows of supervised training once, and leave out or shorten rows that are too long."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow
from transformers import PreTrainedTokenizerBase

from ppo_core.config.row_settings import Overlong
from ppo_core.data.prompts import context_length
from ppo_core.data.rows.encoding import Encoding, tokenizer_digest
from ppo_core.data.rows.overlong import fit_rows
from ppo_core.data.rows.read_rows import Rows, derive
from ppo_core.data.rows.row_columns import WEIGHT, Row
from ppo_core.data.rows.row_error import RowError
from ppo_core.errors import DataError
from ppo_core.io.folder_cache import digest_of_code
from ppo_core.models.loading import load_config
from ppo_core.supervised.examples.added_pairs import added_pairs
from ppo_core.supervised.examples.reward_pairs import PAIR_SCHEMA, pair_encoding
from ppo_core.supervised.examples.sft_examples import EXAMPLE_SCHEMA, example_encoding
from ppo_core.supervised.supervised_config import SupervisedConfig

TrainingKind: TypeAlias = Literal["demonstrations", "pairs"]
"""Kind of the rows of a training: demonstrations for SFT, or pairs for a reward model."""

_CODE = (
    "ppo_core.data.chat_template",
    "ppo_core.data.encode_prompts",
    "ppo_core.data.prompts",
    "ppo_core.data.segments",
    added_pairs.__module__,
    __name__,
)
"""Modules whose code determines the token ids of a row, besides the module of its encoding."""

_MOVE = "Raise max_length up to the model's context, or shorten or remove these rows."


@dataclass(frozen=True)
class _Training:
    """How the rows of one training are encoded."""

    name: str
    encoding: Callable[[PreTrainedTokenizerBase, SupervisedConfig], Encoding[Any]]
    schema: pyarrow.Schema


_TRAININGS = {
    "demonstrations": _Training("sft-tokens", example_encoding, EXAMPLE_SCHEMA),
    "pairs": _Training("pair-tokens", pair_encoding, PAIR_SCHEMA),
}


def max_tokens(model: str | Path, config: SupervisedConfig) -> int:
    """Return the maximum number of tokens of a row: `max_length`, or a shorter model context."""
    return min(config.max_length, context_length(load_config(model)) or config.max_length)


def encode_rows(
    kind: TrainingKind,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    config: SupervisedConfig,
    *,
    limit: int,
    overlong: Overlong,
) -> Rows:
    """Return rows as token ids, see `EXAMPLE_SCHEMA` and `PAIR_SCHEMA`.

    `limit` is the maximum number of tokens of a row. Ties are pairs without a preference. They are
    skipped, because training on a tie would teach a preference that nobody has. Pairs that
    `added_pairs` returns follow their row, unless they are too long.

    Raises:
        DataError: a row is too long and `overlong` is "error", a larger fraction of the rows than
            `rows.max_left_out` is left out, or all rows are ties.
    """
    training = _TRAININGS[kind]
    encode = partial(_encoded, tokenizer, training.encoding(tokenizer, config), limit)

    def convert(batch: Sequence[Row]) -> Iterator[Row | Sequence[Row] | RowError | None]:
        outcomes = encode(overlong, [row for row in batch if not row.get("tie")])
        more = added_pairs(batch, config) if kind == "pairs" else repeat([], len(batch))
        for row, added in zip(batch, more, strict=True):
            outcome = None if row.get("tie") else next(outcomes)
            if isinstance(outcome, dict):
                fitting = (one for one in encode("drop", added) if isinstance(one, dict))
                yield [outcome, *fitting]
            else:
                yield outcome

    inputs = {
        "tokenizer": tokenizer_digest(tokenizer),
        "limit": limit,
        "overlong": overlong,
        "end_of_text": config.end_of_text,
        "completion_only_loss": config.completion_only_loss,
        "repeated_text_pairs": config.repeated_text_pairs,
        "other_prompt_pairs": config.other_prompt_pairs,
        "code": digest_of_code(*_CODE, training.encoding.__module__),
    }
    schema = training.schema
    if WEIGHT in rows.table.column_names:
        schema = schema.append(pyarrow.field(WEIGHT, pyarrow.float64()))
    found = derive(rows, training.name, inputs, convert, schema)
    if not len(found):
        raise DataError(
            f"'{rows.source}' has no row to train on: all of its rows are ties. Add other rows."
        )
    ties = sum(map(bool, rows.column("tie"))) if "tie" in rows.table.column_names else 0
    return replace(found, source=f"{rows.source}, less {ties} ties") if ties else found


def _encoded(
    tokenizer: PreTrainedTokenizerBase,
    encoding: Encoding[Any],
    limit: int,
    overlong: Overlong,
    rows: Sequence[Row],
) -> Iterator[Row | RowError]:
    """Yield each row as token ids with its length; a RowError for a row that does not fit."""
    for outcome in fit_rows(tokenizer, encoding, rows, limit=limit, overlong=overlong, move=_MOVE):
        if isinstance(outcome, RowError):
            yield outcome
        else:
            _, encoded = outcome
            yield {**encoded, "length": encoding.length(encoded)}
