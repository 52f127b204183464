"""Rows in the one form of their kind, from rows in any form."""

from collections.abc import Iterable, Mapping
from typing import Any

from ppo_core.data.rows.read_rows import Rows, read_source
from ppo_core.data.rows.row_columns import Row
from ppo_core.data.rows.row_formats import Kind, find_row_format
from ppo_core.data.sources.source import source_of_rows


def read_row(kind: Kind, row: Mapping[str, Any], *, is_chat: bool = False) -> Row:
    """One row, read by the columns that it has."""
    found = find_row_format(kind, list(row), is_chat=is_chat, first=[dict(row)])
    return found.convert(dict(row))


def rows_of(kind: Kind, rows: Iterable[Mapping[str, Any]], *, is_chat: bool = False) -> Rows:
    """Rows in memory as a data set."""
    return read_source(source_of_rows(list(rows)), kind, is_chat=is_chat)


def plain(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows without their numbers and without fields that have no value."""
    return [
        {name: value for name, value in row.items() if name != "row" and value is not None}
        for row in rows
    ]
