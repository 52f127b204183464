"""Encode the rows of supervised training once, and leave out or shorten rows that are too long."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow
from transformers import PreTrainedTokenizerBase

from ppo_core.config.row_settings import Overlong
from ppo_core.data.folder_cache import digest_of_code
from ppo_core.data.prompts import context_length
from ppo_core.data.rows.forms import Row
from ppo_core.data.rows.overlong import fit_row
from ppo_core.data.rows.reader import Rows, derive
from ppo_core.data.rows.tokenizer_digest import tokenizer_digest
from ppo_core.errors import DataError
from ppo_core.models.loading import load_config
from ppo_core.supervised.reward_pairs import PAIR_SCHEMA, encode_pair, pair_length
from ppo_core.supervised.sft_examples import EXAMPLE_SCHEMA, encode_example
from ppo_core.supervised.supervised_config import SupervisedConfig

TrainingKind: TypeAlias = Literal["demonstrations", "pairs"]
"""Kind of the rows of a training: demonstrations for SFT, or pairs for a reward model."""

_MOVE = "Raise max_length up to the model's context, or shorten or remove these rows."


@dataclass(frozen=True)
class _Encoding:
    """How the rows of one training are encoded."""

    name: str
    encode: Callable[[PreTrainedTokenizerBase, Row, SupervisedConfig], Any]
    length: Callable[[Any], int]
    schema: pyarrow.Schema
    module: str


_ENCODINGS = {
    "demonstrations": _Encoding(
        name="sft-tokens",
        encode=encode_example,
        length=lambda example: len(example["input_ids"]),
        schema=EXAMPLE_SCHEMA,
        module=encode_example.__module__,
    ),
    "pairs": _Encoding(
        name="pair-tokens",
        encode=encode_pair,
        length=pair_length,
        schema=PAIR_SCHEMA,
        module=encode_pair.__module__,
    ),
}


def max_tokens(model: str | Path, config: SupervisedConfig) -> int:
    """Return the maximum number of tokens of a row: `max_length`, or the model's context."""
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

    `limit` is the maximum number of tokens of a row. Ties are skipped, because training on a tie
    would teach a preference that nobody has.

    Raises:
        DataError: a row is too long and `overlong` is "error", more than 1 % of the rows are left
            out, or all rows are ties.
    """
    encoding = _ENCODINGS[kind]

    def encode(row: Row) -> Any:
        return encoding.encode(tokenizer, row, config)

    def convert(row: Row) -> Row | None:
        if row.get("tie"):
            return None
        _, encoded = fit_row(
            row, encode, encoding.length, limit=limit, overlong=overlong, move=_MOVE
        )
        return {**encoded, "length": encoding.length(encoded)}

    inputs = {
        "tokenizer": tokenizer_digest(tokenizer),
        "limit": limit,
        "overlong": overlong,
        "end_of_text": config.end_of_text,
        "completion_only_loss": config.completion_only_loss,
        "code": digest_of_code("ppo_core.data.prompts", __name__, encoding.module),
    }
    encoded = derive(rows, encoding.name, inputs, convert, encoding.schema)
    if not len(encoded):
        raise DataError(
            f"'{rows.source}' has no row to train on: all of its rows are ties. Add other rows."
        )
    return encoded
