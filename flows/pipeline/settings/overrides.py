"""Settings on the command line: `--set section.name=value`."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from typing import Any

from ppo_core.errors import ConfigError

_BOOLEANS = {"True": True, "False": False}

_POINT = re.compile(r'\.(?=(?:[^"]*"[^"]*")*[^"]*$)')
"""Point between two names. A point between double quotes is part of a name, such as a judge's."""


def read_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings in texts such as `ppo.learning_rate=3e-6`, as tables of a settings file.

    A value is written as in TOML, but a text needs no quotes, and True and False are also booleans.

    Raises:
        ConfigError: a text has no name or no `=`; a value that starts like a TOML string, array or
            table is not valid TOML; or a setting is given twice.
    """
    tables: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        parts = [part.strip().strip('"') for part in _POINT.split(name)]
        if not equals or not all(parts):
            raise ConfigError(
                f"--set {text!r:.80} has no name or no '='. Write it as "
                "--set ppo.learning_rate=3e-6, without spaces around '='."
            )
        _insert(tables, parts, _read_value(value.strip(), name.strip()))
    return tables


def merge_tables(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with the changes; tables that exist in both are merged.

    Raises:
        ConfigError: `changes` has a table where `table` has a plain value.
    """
    merged = {**table}
    for name, value in changes.items():
        below = merged.get(name, {})
        if not isinstance(value, Mapping):
            merged[name] = value
        elif isinstance(below, Mapping):
            merged[name] = merge_tables(below, value)
        else:
            raise ConfigError(
                f"{name}={below!r:.80} is a value, and {name}.{next(iter(value), '')} would be a "
                "part of it, so one of them would be ignored. Remove one of them."
            )
    return merged


def _insert(tables: dict[str, Any], parts: Sequence[str], value: object) -> None:
    *sections, last = parts
    table: Any = tables
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise _given_twice(parts)
    if last in table:
        raise _given_twice(parts)
    table[last] = value


def _given_twice(parts: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"--set gives {'.'.join(parts)} twice, or gives both a setting and a part of it. Give each "
        "setting once."
    )


def _read_value(text: str, name: str) -> object:
    """Return the value that a text has in TOML; return a date, a time or plain text as a text."""
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    try:
        # In an inline table, a comment or a second line is an error. Without the inline table, TOML
        # would accept them, and the value would be cut off.
        parsed = tomllib.loads(f"table = {{ value = {text} }}")
    # ValueError: an error of syntax, or an integer of thousands of digits.
    except (ValueError, RecursionError) as error:
        if text.startswith(('"', "'", "[", "{")):
            raise ConfigError(
                f"--set {name}={text!r:.80} is not a TOML value: {error}. Put quotes around the "
                f'argument, as in --set \'{name}=["a", "b"]\'.'
            ) from error
        return text
    value = parsed["table"].get("value")
    is_one_value = parsed == {"table": {"value": value}} and not isinstance(value, date | time)
    return value if is_one_value else text
