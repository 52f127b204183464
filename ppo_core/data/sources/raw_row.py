"""Rows of a data set before their conversion to one form."""

from typing import Any, TypeAlias

RawRow: TypeAlias = dict[str, Any]
"""Values by column name. In JSON, rows may have different columns and values of any type."""

ROWS_AT_ONCE = 1000
"""Number of rows that are read or written together."""
