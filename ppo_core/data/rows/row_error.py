"""The error of a row that is left out, and the reasons in words."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Result = TypeVar("Result")


class RowError(ValueError):
    """A row cannot be used; the message completes "12 rows ...", as in "with an empty prompt"."""

    def __init__(self, reason: str, move: str = "Correct or remove these rows.") -> None:
        """Take the reason, which counts as one for all rows with this text, and the next move."""
        super().__init__(reason)
        self.move = move


def attempt(function: Callable[..., Result], *values: object) -> Result | RowError:
    """Return what a function returns, or the RowError that it raises."""
    try:
        return function(*values)
    except RowError as error:
        return error


def list_reasons(counts: Mapping[str, int]) -> str:
    """Return the number of rows for each reason: `2 with an empty prompt, 1 without a text`."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
