"""Read columns of the rows of supervised training by name, and check their types."""

from collections.abc import Mapping
from typing import Any

from ppo_core.config.checks import is_finite
from ppo_core.data.chat_template import Messages, is_messages
from ppo_core.errors import DataError

Row = Mapping[str, Any]


def read_content(row: Row, name: str) -> str | Messages:
    """Return a column that holds text or messages."""
    value = _read(row, name)
    if isinstance(value, str) or is_messages(value):
        return value
    raise DataError(
        f"'{name}' is {type(value).__name__}, not text or messages: {value!r:.80}. "
        "Convert the column, or drop the row."
    )


def read_text(row: Row, name: str) -> str:
    """Return a column that holds text."""
    value = _read(row, name)
    if isinstance(value, str):
        return value
    raise DataError(
        f"'{name}' is {type(value).__name__}, not text: {value!r:.80}. Convert the column, or drop "
        "the row."
    )


def read_messages(row: Row, name: str) -> Messages:
    """Return a column that holds a conversation."""
    value = _read(row, name)
    if is_messages(value):
        return value
    raise DataError(
        f"'{name}' is {type(value).__name__}, not a list of messages: {value!r:.80}. "
        "Convert the column, or drop the row."
    )


def read_number(row: Row, name: str) -> float:
    """Return a column that holds a finite number."""
    value = _read(row, name)
    # bool is a subclass of int, so True would pass as a margin of 1.
    if isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value):
        return float(value)
    raise DataError(
        f"'{name}' is {value!r:.80}, not a finite number. Correct the number, or drop the row."
    )


def _read(row: Row, name: str) -> object:
    if name not in row:
        raise DataError(
            f"there is no column '{name}', only: {', '.join(map(str, row))}. "
            "Rename a column of the data."
        )
    return row[name]


def as_messages(response: str | Messages) -> Messages:
    """Return a response as messages; a text becomes one assistant message."""
    return [{"role": "assistant", "content": response}] if isinstance(response, str) else response


def in_row(number: int, error: DataError) -> DataError:
    """Return the error with the row number at the start of the message."""
    return DataError(f"Row {number}: {error}")
