"""Encode the rows of supervised training once, and leave out or shorten rows that do not fit."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from transformers import PreTrainedTokenizerBase

from ppo_core.config.row_settings import Overlong
from ppo_core.data.chat_template import Messages
from ppo_core.data.folder_cache import digest_of_code
from ppo_core.data.prompts import context_length
from ppo_core.data.rows.forms import Row
from ppo_core.data.rows.overlong import refuse_long, shortened, too_long
from ppo_core.data.rows.reader import ROW, Rows, derive
from ppo_core.data.rows.row_error import RowError
from ppo_core.data.rows.tokenizer_digest import tokenizer_digest
from ppo_core.errors import DataError
from ppo_core.models.loading import load_config
from ppo_core.supervised.reward_pairs import PAIR_SCHEMA, encode_pair, pair_length
from ppo_core.supervised.sft_examples import EXAMPLE_SCHEMA, encode_example
from ppo_core.supervised.supervised_config import SupervisedConfig

_MOVE = "Raise max_length up to the model's context, or shorten or remove these rows."

_CODE = tuple(
    f"ppo_core.{name}"
    for name in (
        *("supervised.encoded_rows", "supervised.reward_pairs", "supervised.sft_examples"),
        *("data.prompts", "data.rows.overlong"),
    )
)


@dataclass(frozen=True)
class _Encoding:
    """How the rows of one training are encoded."""

    name: str
    encode: Callable[[PreTrainedTokenizerBase, Row, SupervisedConfig], Any]
    length: Callable[[Any], int]
    schema: pyarrow.Schema


_PAIRS = _Encoding("pair-tokens", encode_pair, pair_length, PAIR_SCHEMA)
_EXAMPLES = _Encoding(
    "sft-tokens", encode_example, lambda example: len(example["input_ids"]), EXAMPLE_SCHEMA
)


def max_tokens(model: str | Path, config: SupervisedConfig) -> int:
    """Return the maximum number of tokens of a row: `max_length`, or the model's context."""
    return min(config.max_length, context_length(load_config(model)) or config.max_length)


def encode_pairs(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    config: SupervisedConfig,
    *,
    limit: int,
    overlong: Overlong,
) -> Rows:
    """Return preferences as token ids, see `PAIR_SCHEMA`; `limit` is the maximum of tokens.

    Raises:
        DataError: a row is too long and `overlong` is "error", or more than 1 % of the rows are
            left out.
    """
    return _encoded(_PAIRS, rows, tokenizer, config, limit, overlong)


def encode_examples(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    config: SupervisedConfig,
    *,
    limit: int,
    overlong: Overlong,
) -> Rows:
    """Return demonstrations as token ids and labels, see `EXAMPLE_SCHEMA` and `encode_pairs`.

    Raises:
        DataError: see `encode_pairs`.
    """
    return _encoded(_EXAMPLES, rows, tokenizer, config, limit, overlong)


def _encoded(
    encoding: _Encoding,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    config: SupervisedConfig,
    limit: int,
    overlong: Overlong,
) -> Rows:
    def convert(row: Row) -> Row | None:
        # A tie would teach a preference that nobody has.
        if row.get("tie"):
            return None
        encoded = _encode(row)
        if (length := encoding.length(encoded)) > limit:
            if overlong == "error":
                raise refuse_long(row[ROW], length, limit, _MOVE)
            encoded = None if overlong == "drop" else _encode_shortened(row)
            if encoded is None:
                raise too_long(limit, _MOVE)
        return {**encoded, "length": encoding.length(encoded)}

    def _encode(row: Row) -> Any:
        try:
            return encoding.encode(tokenizer, row, config)
        except DataError as error:
            raise RowError(f"that cannot be encoded ({error})") from error

    def _encode_shortened(row: Row) -> Any:
        field = "messages" if "messages" in row else "prompt"

        def fits(prompt: str | Messages) -> bool:
            return encoding.length(_encode({**row, field: prompt})) <= limit

        kept = shortened(row[field], fits) if row.get(field) else None
        return None if kept is None else _encode({**row, field: kept})

    inputs = {
        "tokenizer": tokenizer_digest(tokenizer),
        "limit": limit,
        "overlong": overlong,
        "end_of_text": config.end_of_text,
        "completion_only_loss": config.completion_only_loss,
        "code": digest_of_code(*_CODE),
    }
    return derive(rows, encoding.name, inputs, convert, encoding.schema)
