"""Rows with more tokens than fit: an error, left out, or with a shortened prompt."""

import re
from collections.abc import Callable

from ppo_core.data.chat_template import Messages
from ppo_core.data.rows.dialogues import HUMAN, is_hh
from ppo_core.data.rows.row_error import RowError
from ppo_core.errors import DataError


def too_long(limit: int, move: str) -> RowError:
    """Return the error of a row with more than `limit` tokens."""
    return RowError(f"with more than {limit} tokens", move)


def refuse_long(number: int, length: int, limit: int, move: str) -> DataError:
    """Return the error of the setting "error", for row `number` with `length` tokens."""
    return DataError(
        f"Row {number} has {length} tokens, and at most {limit} fit. {move} Or set overlong to "
        "drop or truncate."
    )


def shortened(
    prompt: str | Messages, fits: Callable[[str | Messages], bool]
) -> str | Messages | None:
    """Return the longest end of a prompt that fits, or None if not even the shortest fits.

    Of messages, the oldest turns are removed; a message of the system and the last message stay.
    A text of HH is cut at the start of a turn, any other text between two words.
    """
    if isinstance(prompt, str):
        start = re.escape(HUMAN) if is_hh(prompt) else r"\S+"
        starts = [found.start() for found in re.finditer(start, prompt)]
        return _first_that_fits(len(starts), lambda number: prompt[starts[number] :], fits)
    ends = _ends_of_messages(prompt)
    return _first_that_fits(len(ends), lambda number: ends[number], fits)


def _ends_of_messages(prompt: Messages) -> list[Messages]:
    head = [turn for turn in prompt[:1] if turn["role"] == "system"]
    rest = prompt[len(head) :]
    # A conversation begins with the user, so an answer is removed together with its question.
    starts = [number for number, turn in enumerate(rest) if turn["role"] == "user"]
    return [[*head, *rest[start:]] for start in starts]


def _first_that_fits(
    count: int,
    end: Callable[[int], str | Messages],
    fits: Callable[[str | Messages], bool],
) -> str | Messages | None:
    """Return the longest of `count` ends that fits; each is longer than the next."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if fits(end(middle)):
            high = middle
        else:
            low = middle + 1
    return end(low) if low < count else None
