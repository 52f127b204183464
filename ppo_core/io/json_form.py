"""Check the form of JSON that may be damaged."""

import math
from collections.abc import Callable, Mapping
from typing import Any

Form = Any
"""The form of a JSON value: a function that returns whether a value is valid, a list with the form
of every item, or a dict with the form of each key; other keys may have any value."""


def check_form(value: Any, form: Form, place: str = "the document") -> None:
    """Raise if a JSON value has another form.

    Raises:
        ValueError: the form differs; the message names the place and the value.
    """
    if isinstance(form, Mapping):
        _require(isinstance(value, dict), place, "no object", value)
        for key, inner in form.items():
            _require(key in value, place, f"an object without {key!r}", value)
            check_form(value[key], inner, f"{place}.{key}")
    elif isinstance(form, list):
        _require(isinstance(value, list), place, "no list", value)
        for number, item in enumerate(value):
            check_form(item, form[0], f"{place}[{number}]")
    else:
        _require(form(value), place, f"no {form.__name__.removeprefix('is_')}", value)


def _require(is_valid: bool, place: str, fault: str, value: Any) -> None:
    if not is_valid:
        raise ValueError(f"{place} is {fault}: {value!r:.60}")


# --- Forms of single values ----------------------------------------------------


def is_count(value: Any) -> bool:
    """Return whether a value is an integer that is not negative."""
    return type(value) is int and value >= 0


def is_number(value: Any) -> bool:
    """Return whether a value is an integer or a float; NaN and infinity are floats."""
    return type(value) in (int, float)


def is_finite_number(value: Any) -> bool:
    """Return whether a value is a number, but neither NaN nor infinity."""
    return is_number(value) and math.isfinite(value)


def is_text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def is_list(value: Any) -> bool:
    """Return whether a value is a list."""
    return isinstance(value, list)


def is_object(value: Any) -> bool:
    """Return whether a value is an object with any content."""
    return isinstance(value, dict)


def is_finite_json(value: Any) -> bool:
    """Return whether a value has only finite numbers, at any depth."""
    if isinstance(value, dict):
        return all(map(is_finite_json, value.values()))
    if isinstance(value, list):
        return all(map(is_finite_json, value))
    return not isinstance(value, float) or math.isfinite(value)


def object_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return the form of an object whose values are all valid."""

    def is_object_of_such_values(value: Any) -> bool:
        return isinstance(value, dict) and all(map(is_valid, value.values()))

    return is_object_of_such_values


def optional(form: Form) -> Callable[[Any], bool]:
    """Return the form of a value that may be null."""

    def is_null_or_valid(value: Any) -> bool:
        if value is not None:
            check_form(value, form)
        return True

    return is_null_or_valid
