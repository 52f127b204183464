"""Rows as a data set holds them."""

from typing import Any, TypeAlias

RawRow: TypeAlias = dict[str, Any]
"""Values by column name. In JSON, rows may have different columns and values of any type."""

ROWS_AT_ONCE = 1000
"""Number of rows that are read or written together."""
