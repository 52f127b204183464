"""Rows that are too long for a model: an error, left out, or with a shortened prompt."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppo_core.config.row_settings import Overlong
from ppo_core.data.chat_template import Messages, is_messages
from ppo_core.data.rows.dialogues import HUMAN, is_hh
from ppo_core.data.rows.encoding import Encoded, Encoding, encode_batch, encode_row
from ppo_core.data.rows.forms import Row
from ppo_core.data.rows.reader import ROW
from ppo_core.data.rows.row_error import RowError, attempt
from ppo_core.errors import DataError


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

    A row that cannot be encoded, or is too long, is a RowError.

    Args:
        tokenizer: the tokenizer.
        encoding: how a row is encoded.
        rows: rows whose prompt is the field `prompt`, or the conversation in `messages`.
        limit: maximum number of tokens; None is no limit.
        overlong: what happens to a longer row.
        move: advice for a row that is too long.

    Raises:
        DataError: a row is too long and `overlong` is "error".
    """

    def encode(row: Row) -> Encoded:
        return encode_row(tokenizer, encoding, row)

    def fit(row: Row, whole: Encoded) -> tuple[Row, Encoded]:
        if limit is None or (length := encoding.length(whole)) <= limit:
            return row, whole
        if overlong == "error":
            raise DataError(
                f"Row {row[ROW]} has {length} tokens, and at most {limit} fit. {move} Or set "
                "overlong to drop or truncate."
            )
        shorter = None
        if overlong == "truncate":
            shorter = _shortened(row, limit, lambda each: encoding.length(encode(each)) <= limit)
        if shorter is None:
            raise RowError(f"with more than {limit} tokens", move)
        return shorter, encode(shorter)

    wholes = encode_batch(tokenizer, encoding, rows)
    for row, whole in zip(rows, wholes, strict=True):
        yield whole if isinstance(whole, RowError) else attempt(fit, row, whole)


def _shortened(row: Row, limit: int, fits: Callable[[Row], bool]) -> Row | None:
    """Return the row with the longest end of its prompt that fits, or None if no end fits.

    Of messages, the oldest turns are removed; a message of the system and the last message stay.
    A text of HH is cut at the start of a turn, any other text between two words.
    """
    field = "messages" if "messages" in row else "prompt"
    prompt = row.get(field)
    if not prompt:
        return None

    def with_end(end: Any) -> Row:
        return {**row, field: end}

    if isinstance(prompt, str):
        start = re.escape(HUMAN) if is_hh(prompt) else r"\S+"
        starts = [found.start() for found in re.finditer(start, prompt)]
        return _first_that_fits(
            len(starts), lambda number: with_end(prompt[starts[number] :]), fits
        )
    if is_messages(prompt):
        ends = _ends_of_messages(prompt)
        return _first_that_fits(len(ends), lambda number: with_end(ends[number]), fits)
    # Token ids, of which each is one token.
    return with_end(prompt[-limit:]) if limit > 0 else None


def _ends_of_messages(prompt: Messages) -> list[Messages]:
    head = [turn for turn in prompt[:1] if turn["role"] == "system"]
    rest = prompt[len(head) :]
    # A conversation begins with the user, so an answer is removed together with its question.
    starts = [number for number, turn in enumerate(rest) if turn["role"] == "user"]
    return [[*head, *rest[start:]] for start in starts]


def _first_that_fits(
    count: int, candidate: Callable[[int], Row], fits: Callable[[Row], bool]
) -> Row | None:
    """Return the longest of `count` candidates that fits; each is longer than the next."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if fits(candidate(middle)):
            high = middle
        else:
            low = middle + 1
    return candidate(low) if low < count else None
