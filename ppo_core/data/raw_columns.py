"""Combine converted prompts with the original columns of their data set."""

from collections.abc import Iterable
from typing import Any

from ppo_core.data.prompts import PROMPT_COLUMNS
from ppo_core.data.rows.read_rows import ROW
from ppo_core.data.rows.row_columns import Row
from ppo_core.data.sources.source import Source


def rows_with_columns(rows: Iterable[Row], source: Source) -> list[dict[str, Any]]:
    """Return each converted row, merged with the original row of the same number in `source`.

    The converted prompt is in the column `prompt`; the columns in `PROMPT_COLUMNS` are removed from
    the original row. A converted value that is not None replaces an original value of equal name.
    """
    read = list(rows)
    numbers = {row[ROW] for row in read}
    raw = {number: row for number, row in enumerate(source.rows()) if number in numbers}
    return [
        {name: value for name, value in raw[row[ROW]].items() if name not in PROMPT_COLUMNS}
        | {name: value for name, value in row.items() if name != ROW and value is not None}
        for row in read
    ]
