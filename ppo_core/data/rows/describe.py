"""Texts in which a command describes the rows that it read."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from ppo_core.data.rows.read_rows import Rows
from ppo_core.data.rows.row_error import list_reasons
from ppo_core.errors import ConfigError
from ppo_core.errors.control_characters import escape_controls

MAX_SHOWN = 500
"""Maximum number of characters of a row that a message shows."""


def describe_reading(rows: Rows) -> str:
    """Return a line with the number of rows, the columns read, and how many rows were left out."""
    columns = ", ".join(
        field if field == column else f"{field} from {column}"
        for field, column in rows.reading.items()
    )
    left_out = f"; left out: {list_reasons(rows.left_out)}" if rows.left_out else ""
    return escape_controls(f"{rows.source}: {len(rows)} rows, reading {columns}{left_out}")


def describe_first(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return a line with the first row as the model reads it, special tokens included."""
    text = repr(tokenizer.decode(list(ids)))
    shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
    return f"the first row, as the model reads it: {shown}"


def require_columns_read(renamed: Mapping[str, str], *read: Rows) -> None:
    """Raise if the setting `columns` names a column that was not read from any data set.

    Raises:
        ConfigError: a column was not read; the message names the field and the column.
    """
    described = {columns for rows in read for columns in rows.reading.values()}
    # A description may be a list of columns, separated by commas, or a name that has a comma.
    columns = described | {column for columns in described for column in columns.split(", ")}
    for field, name in renamed.items():
        if name not in columns:
            raise ConfigError(
                f"columns: {field}={name} was not used: no data set has the column {name!r}, or "
                f"this command does not read {field}. Correct or remove it."
            )
