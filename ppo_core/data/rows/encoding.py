"""Encode rows in batches; a row that cannot be encoded does not stop the other rows."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from ppo_core.data.rows.row_columns import Row
from ppo_core.data.rows.row_error import Result, RowError, attempt
from ppo_core.data.segments import EncodedSegment, Segment, encode_sequences
from ppo_core.errors import DataError

Encoded = TypeVar("Encoded")


@dataclass(frozen=True)
class Encoding(Generic[Encoded]):
    """The functions that encode a row.

    `sequences` returns the sequences of a row. The tokenizer then encodes the sequences of many
    rows at once, and `build` makes the encoded form of each row.
    """

    sequences: Callable[[Row], Sequence[Sequence[Segment]]]
    """Return the sequences of a row. Raise RowError or DataError if the row cannot be encoded."""

    build: Callable[[Row, Sequence[list[EncodedSegment]]], Encoded]
    """Return the encoded form of a row, from the row and its encoded sequences. Raise RowError or
    DataError if the row cannot be encoded."""

    length: Callable[[Encoded], int]
    """Return the number of tokens of an encoded row."""


def encode_batch(
    tokenizer: PreTrainedTokenizerBase, encoding: Encoding[Encoded], rows: Sequence[Row]
) -> list[Encoded | RowError]:
    """Return the encoded form of each row, or a RowError for a row that cannot be encoded."""
    given = [_attempt(encoding.sequences, row) for row in rows]
    texts = [sequences for sequences in given if not isinstance(sequences, RowError)]
    encoded = iter(encode_sequences(tokenizer, list(chain.from_iterable(texts))))
    return [
        sequences
        if isinstance(sequences, RowError)
        else _attempt(encoding.build, row, list(islice(encoded, len(sequences))))
        for row, sequences in zip(rows, given, strict=True)
    ]


def encode_row(
    tokenizer: PreTrainedTokenizerBase, encoding: Encoding[Encoded], row: Row
) -> Encoded:
    """Return the encoded form of one row.

    Raises:
        RowError: the row cannot be encoded.
    """
    [encoded] = encode_batch(tokenizer, encoding, [row])
    if isinstance(encoded, RowError):
        raise encoded
    return encoded


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short digest of a tokenizer and its chat template, which change the token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else backend.to_str()
    parts = [
        type(tokenizer).__name__,
        rules,
        tokenizer.chat_template,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _attempt(function: Callable[..., Result], *values: object) -> Result | RowError:
    try:
        return attempt(function, *values)
    except DataError as error:
        return RowError(f"that cannot be encoded ({error})")
