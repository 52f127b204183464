"""Columns of the prompts' rows that reward functions receive by keyword."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from types import MappingProxyType
from typing import Any, TypeAlias

from ppo_core.config.spelling import nearest_name
from ppo_core.errors import ConfigError

Columns: TypeAlias = Mapping[str, Sequence[Any]]
"""Column -> its values, one for each row."""

NO_COLUMNS: Columns = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class AskedColumns:
    """The columns that a reward function takes after prompts and responses."""

    function: str
    """Name of the function."""

    required: tuple[str, ...] = ()
    """Parameters without a default."""

    optional: tuple[str, ...] = ()
    """Parameters with a default, which is used if no row has a value of the column."""

    others: bool = False
    """Whether the function takes all other columns too, as `**columns`."""

    taken: tuple[str, ...] = ()
    """Parameters for prompts and responses, and keywords bound by `partial`; a column with one of
    these names is not passed."""

    @property
    def is_empty(self) -> bool:
        """Whether the function takes no column."""
        return not (self.required or self.optional or self.others)

    def takes(self, column: str) -> bool:
        """Return whether the function takes a column."""
        named = column in (*self.required, *self.optional)
        return named or (self.others and column not in self.taken)

    def select(self, columns: Columns) -> dict[str, list[Any]]:
        """Return the columns that the function takes, as new lists."""
        return {name: list(values) for name, values in columns.items() if self.takes(name)}

    def require(self, known: Collection[str]) -> None:
        """Raise if a required column is not in `known`.

        Raises:
            ConfigError: a required column is missing; the message proposes the nearest name.
        """
        for name in self.required:
            if name in known:
                continue
            near = nearest_name(name, known)
            hint = f" Did you mean {near}?" if near else ""
            there = f"The columns are {', '.join(known)}." if known else "The rows have no columns."
            raise ConfigError(
                f"The reward function {self.function} needs the column {name!r}, but no prompt "
                f"has a value for it.{hint} {there} Rename the parameter or the column, or give "
                "the parameter a default."
            )


def asked_columns(name: str, function: Callable[..., Any]) -> AskedColumns:
    """Return the columns that a reward function takes according to its signature.

    The first two positional parameters get prompts and responses.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    # A function written in C may have no signature.
    except (TypeError, ValueError):
        return AskedColumns(function=name)
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    first = [one for one in parameters if one.kind in kinds][:2]
    bound = function.keywords if isinstance(function, partial) else {}
    by_name = [
        one
        for one in parameters
        if one.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        and one not in first
        and one.name not in bound
    ]
    return AskedColumns(
        function=name,
        required=tuple(one.name for one in by_name if one.default is Parameter.empty),
        optional=tuple(one.name for one in by_name if one.default is not Parameter.empty),
        others=any(one.kind is Parameter.VAR_KEYWORD for one in parameters),
        taken=(*(one.name for one in first if one.kind is not Parameter.POSITIONAL_ONLY), *bound),
    )


def columns_of(rows: Iterable[Any], asked: Sequence[AskedColumns]) -> dict[str, list[Any]]:
    """Return the columns that reward functions take; a row without a value has None.

    A row that is not a mapping is a prompt without columns. A column whose name is not a text is
    ignored, because it cannot be passed by keyword.

    Raises:
        ConfigError: a function requires a column, and no row has a value in that column.
    """
    tables = [row if isinstance(row, Mapping) else {} for row in rows]
    known = dict.fromkeys(
        name
        for row in tables
        for name, value in row.items()
        if value is not None and isinstance(name, str)
    )
    for one in asked:
        one.require(known)
    return {
        name: [row.get(name) for row in tables]
        for name in known
        if any(one.takes(name) for one in asked)
    }
