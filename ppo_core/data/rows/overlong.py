"""Rows that are too long for a model: an error, left out, or with a shortened prompt."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from ppo_core.config.row_settings import Overlong
from ppo_core.data.chat_template import Messages, is_messages
from ppo_core.data.rows.dialogues import HUMAN, is_hh
from ppo_core.data.rows.forms import Row
from ppo_core.data.rows.reader import ROW
from ppo_core.data.rows.row_error import RowError
from ppo_core.errors import DataError

Encoded = TypeVar("Encoded")


def fit_row(
    row: Row,
    encode: Callable[[Row], Encoded],
    length_of: Callable[[Encoded], int],
    *,
    limit: int | None,
    overlong: Overlong,
    move: str,
) -> tuple[Row, Encoded]:
    """Return a row and its encoded form; with overlong="truncate" the prompt may be shortened.

    Args:
        row: the row; its prompt is the field `prompt`, or the conversation in `messages`.
        encode: function that encodes a row.
        length_of: function that returns the number of tokens of an encoded row.
        limit: maximum number of tokens; None is no limit.
        overlong: what happens to a longer row.
        move: advice for a row that is too long.

    Raises:
        DataError: the row is too long and `overlong` is "error".
        RowError: the row cannot be encoded, or is too long.
    """

    def encoded(candidate: Row) -> Encoded:
        try:
            return encode(candidate)
        except DataError as error:
            raise RowError(f"that cannot be encoded ({error})") from error

    whole = encoded(row)
    if limit is None or (length := length_of(whole)) <= limit:
        return row, whole
    if overlong == "error":
        raise DataError(
            f"Row {row[ROW]} has {length} tokens, and at most {limit} fit. {move} Or set overlong "
            "to drop or truncate."
        )
    shorter = None
    if overlong == "truncate":
        shorter = _shortened(row, limit, lambda each: length_of(encoded(each)) <= limit)
    if shorter is None:
        raise RowError(f"with more than {limit} tokens", move)
    return shorter, encoded(shorter)


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
