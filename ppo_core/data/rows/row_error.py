"""The error of a row that is left out, and a text that counts these errors by reason."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

Result = TypeVar("Result")

MOST_LISTED = 5
"""Maximum number of reasons that `list_reasons` names."""


class RowError(ValueError):
    """A row cannot be used; the message completes "12 rows ...", as in "with an empty prompt"."""

    def __init__(self, reason: str, move: str = "Correct or remove these rows.") -> None:
        """Store the reason, by which rows are counted, and `move`, the advice for the user."""
        super().__init__(reason)
        self.move = move


def attempt(function: Callable[..., Result], *values: object) -> Result | RowError:
    """Return the result of a function, or the RowError that the function raises."""
    try:
        return function(*values)
    except RowError as error:
        return error


def list_reasons(counts: Mapping[str, int]) -> str:
    """Return how many rows have each reason, as in `2 with an empty prompt, 1 without a text`.

    Of more than MOST_LISTED reasons, only the most frequent ones are named.
    """
    listed = dict(counts)
    if len(counts) > MOST_LISTED:
        listed = dict(Counter(counts).most_common(MOST_LISTED))
        listed["for other reasons"] = sum(counts.values()) - sum(listed.values())
    return ", ".join(f"{count} {reason}" for reason, count in listed.items())
