"""A row as a data set holds it."""

from typing import Any, TypeAlias

RawRow: TypeAlias = dict[str, Any]
"""Values by column name. In JSON, rows may have different columns and values of any type."""
