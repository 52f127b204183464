"""Handle rows that are too long for a model: raise, leave the row out, or shorten its prompt."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppo_core.config.row_settings import Overlong
from ppo_core.data.chat_template import Messages, is_messages
from ppo_core.data.encode_prompts import dialogue_segments, prompt_segment
from ppo_core.data.prompts import count_characters, max_characters
from ppo_core.data.rows.dialogues import HUMAN, is_hh
from ppo_core.data.rows.encoding import (
    Encoded,
    Encoding,
    encode_batch,
    encode_row,
    tokenizer_digest,
)
from ppo_core.data.rows.read_rows import ROW, Rows, derive
from ppo_core.data.rows.row_columns import Row
from ppo_core.data.rows.row_error import RowError, attempt
from ppo_core.data.segments import EncodedSegment, Segment, joined
from ppo_core.errors import ConfigError, DataError
from ppo_core.io.folder_cache import digest_of_code


def fit_prompts(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int | None,
    response_length: int,
    overlong: Overlong,
) -> Rows:
    """Return the rows whose prompts leave room for `response_length` tokens in a model's context.

    With overlong="truncate", prompts that are too long are shortened. If `context` is None, there
    is no limit.

    Raises:
        ConfigError: the context has no room for a prompt.
        DataError: a prompt is too long and `overlong` is "error", or more than the fraction
            `rows.max_left_out` of the rows is left out.
    """

    def sequences(row: Row) -> list[list[Segment]]:
        return [[prompt_segment(tokenizer, row["prompt"])]]

    limit = None if context is None else context - response_length
    if limit is not None and limit < 1:
        raise ConfigError(
            f"The model's context of {context} tokens has no room for a prompt and "
            f"response_length={response_length} tokens. Lower response_length."
        )
    move = (
        f"The model's context has {context} tokens, {response_length} of them for the response. "
        "Lower response_length, or shorten or remove these prompts."
    )
    return _fit(rows, "fitting-prompts", tokenizer, sequences, limit, overlong, move)


def fit_pairs(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    overlong: Overlong,
    *,
    end_of_text: bool,
) -> Rows:
    """Return the preferences whose two texts each have 1 to `limit` tokens for a reward model.

    With overlong="truncate", prompts that are too long are shortened. If `limit` is None, there is
    no maximum.

    Raises:
        DataError: see `fit_prompts`.
    """

    def sequences(row: Row) -> list[list[Segment]]:
        return [
            dialogue_segments(tokenizer, row["prompt"], row[side], end=end_of_text)
            for side in ("chosen", "rejected")
        ]

    name = f"fitting-pairs-{'ended' if end_of_text else 'open'}"
    move = "Shorten or remove these rows, which the reward model cannot read."
    return _fit(rows, name, tokenizer, sequences, limit, overlong, move)


def _fit(
    rows: Rows,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Callable[[Row], list[list[Segment]]],
    limit: int | None,
    overlong: Overlong,
    move: str,
) -> Rows:
    """Return the rows whose sequences all have 1 to `limit` tokens."""

    def length_of(row: Row, encoded: Sequence[list[EncodedSegment]]) -> int:
        lengths = [len(joined(sequence)) for sequence in encoded]
        return max(lengths) if all(lengths) else 0

    encoding = Encoding(sequences, length_of, length=int)

    def convert(batch: Sequence[Row]) -> Iterator[Row | RowError]:
        for outcome in fit_rows(
            tokenizer, encoding, batch, limit=limit, overlong=overlong, move=move
        ):
            if isinstance(outcome, RowError):
                yield outcome
                continue
            fitting, length = outcome
            if length == 0:
                yield RowError("without tokens")
            else:
                yield {field: value for field, value in fitting.items() if field != ROW}

    inputs = {
        "tokenizer": tokenizer_digest(tokenizer),
        "limit": limit,
        "overlong": overlong,
        "code": digest_of_code(
            "ppo_core.data.chat_template",
            "ppo_core.data.encode_prompts",
            "ppo_core.data.prompts",
            "ppo_core.data.segments",
        ),
    }
    return derive(rows, name, inputs, convert)


def fit_rows(
    tokenizer: PreTrainedTokenizerBase,
    encoding: Encoding[Encoded],
    rows: Sequence[Row],
    *,
    limit: int | None,
    overlong: Overlong,
    move: str,
) -> Iterator[tuple[Row, Encoded] | RowError]:
    """Yield each row and its encoded form; with overlong="truncate" the prompt may be shortened.

    For a row that cannot be encoded, or that remains too long, yield a RowError instead.

    Args:
        tokenizer: the tokenizer.
        encoding: the functions that encode a row.
        rows: rows whose prompt is the field `prompt`, or the conversation in `messages`.
        limit: maximum number of tokens; if None, there is no limit.
        overlong: what happens to a longer row.
        move: advice in the error of a row that is too long.

    Raises:
        DataError: a row is too long and `overlong` is "error".
    """
    most = max_characters(limit)

    def fits(row: Row) -> bool:
        if _largest(row) > most:
            return False
        return limit is None or encoding.length(encode_row(tokenizer, encoding, row)) <= limit

    allowed = f"{most} characters" if limit is None else f"{limit} tokens"

    def fit(row: Row, whole: Encoded | None) -> tuple[Row, Encoded]:
        if whole is not None and (limit is None or encoding.length(whole) <= limit):
            return row, whole
        if overlong == "error":
            too_long = (
                f"a text of {_largest(row)} characters, and at most {allowed} fit"
                if whole is None
                else f"{encoding.length(whole)} tokens, and at most {limit} fit"
            )
            raise DataError(
                f"Row {row[ROW]} has {too_long}. {move} Or set overlong to drop or truncate."
            )
        shorter = _shortened(row, limit, most, fits) if overlong == "truncate" else None
        if shorter is None:
            raise RowError(f"with more than {allowed}", move)
        return shorter, encode_row(tokenizer, encoding, shorter)

    # Rows that are far too large are not encoded, because the tokenizer would need much memory.
    small = [row for row in rows if _largest(row) <= most]
    encoded = encode_batch(tokenizer, encoding, small)
    wholes = iter(encoded)
    for row in rows:
        whole = next(wholes) if _largest(row) <= most else None
        yield whole if isinstance(whole, RowError) else attempt(fit, row, whole)


def _largest(row: Row) -> int:
    """Return the number of characters of the largest text or conversation in a row."""
    return max(map(count_characters, row.values()))


def _shortened(row: Row, limit: int | None, most: int, fits: Callable[[Row], bool]) -> Row | None:
    """Return the row with as little as possible removed from the start of its prompt.

    Return None if no end of the prompt fits. The limits are `limit` tokens and `most` characters.
    Messages are cut before a message of the user, but a system message at the start is kept. A text
    of HH is cut before a turn of the human, and any other text before a word.
    """
    field = "messages" if "messages" in row else "prompt"
    prompt = row.get(field)
    if not prompt:
        return None

    def with_end(end: Any) -> Row:
        return {**row, field: end}

    if isinstance(prompt, str):
        start = re.escape(HUMAN) if is_hh(prompt) else r"(?<!\S)\S"
        # Begin one character earlier, because this character may be the space before a word.
        first = max(0, len(prompt) - most - 1)
        starts = [found.start() for found in re.compile(start).finditer(prompt, first)]
        return _first_that_fits(
            len(starts), lambda number: with_end(prompt[starts[number] :]), fits
        )
    if is_messages(prompt):
        ends = _ends_of_messages(prompt)
        return _first_that_fits(len(ends), lambda number: with_end(ends[number]), fits)
    # The prompt is a list of token ids.
    return with_end(prompt[-limit:]) if limit is not None and limit > 0 else None


def _ends_of_messages(prompt: Messages) -> list[Messages]:
    head = [turn for turn in prompt[:1] if turn["role"] == "system"]
    rest = prompt[len(head) :]
    # A conversation begins with the user, so an answer is removed together with its question.
    starts = [number for number, turn in enumerate(rest) if turn["role"] == "user"]
    return [[*head, *rest[start:]] for start in starts]


def _first_that_fits(
    count: int, candidate: Callable[[int], Row], fits: Callable[[Row], bool]
) -> Row | None:
    """Return the first of `count` candidates that fits, or None; they are sorted long to short."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if fits(candidate(middle)):
            high = middle
        else:
            low = middle + 1
    return candidate(low) if low < count else None
