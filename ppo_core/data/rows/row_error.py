"""The error of a row that is left out, and the list of such errors for a message."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Result = TypeVar("Result")


class RowError(ValueError):
    """A row cannot be used; the message completes "12 rows ...", as in "with an empty prompt"."""

    def __init__(self, reason: str, move: str = "Correct or remove these rows.") -> None:
        """Take the reason and the advice for the user; rows are counted by their reason."""
        super().__init__(reason)
        self.move = move


def attempt(function: Callable[..., Result], *values: object) -> Result | RowError:
    """Return the result of a function, or the RowError that the function raises."""
    try:
        return function(*values)
    except RowError as error:
        return error


def list_reasons(counts: Mapping[str, int]) -> str:
    """Return the number of rows for each reason: `2 with an empty prompt, 1 without a text`."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
