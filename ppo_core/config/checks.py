"""Checks of settings; the errors name the setting and its value."""

import math
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ppo_core.errors import ConfigError


def require(config: object, name: str, holds: bool, what: str) -> None:
    """Raise unless the setting's value passed its check.

    Args:
        config: the settings.
        name: name of the setting.
        holds: result of the check.
        what: description of valid values, after "must be".

    Raises:
        ConfigError: `holds` is False.
    """
    if not holds:
        raise ConfigError(f"{name}={getattr(config, name)!r} must be {what}.")


def require_count(config: object, name: str) -> None:
    """Raise unless a setting is an integer of at least 1.

    Raises:
        ConfigError: the value is not an integer, or is below 1.
    """
    value = getattr(config, name)
    require(config, name, isinstance(value, int) and value >= 1, "a whole number, at least 1")


def check_type(kind: Any, value: object, name: str) -> None:
    """Raise unless the value of a setting, read from a file, has the type of its field.

    Args:
        kind: the type as annotated.
        value: the value; it is not converted, so that it can be written as it was.
        name: full name of the setting.

    Raises:
        ConfigError: the value has another type, or is a text with a null character, which no path
            may contain.
    """
    try:
        _adapter_of(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise ConfigError(f"{name}={value!r:.80}: {error.errors()[0]['msg']}.") from error
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name}={value!r:.80} has a null character. Remove it.")


@cache
def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def require_finite(config: object) -> None:
    """Raise if a number among the settings is infinite or NaN, or an integer of over 64 bits.

    Raises:
        ConfigError: there is such a number.
    """
    for name, value in vars(config).items():
        if isinstance(value, int | float) and not is_finite(value):
            raise ConfigError(f"{name}={value!r:.80} must be a finite number.")


def require_seed(config: object) -> None:
    """Raise unless numpy and torch accept the setting `seed`.

    Raises:
        ConfigError: the seed is negative or too large.
    """
    require(config, "seed", 0 <= config.seed < 2**32, "at least 0 and below 2**32")  # type: ignore[attr-defined]


def is_finite(value: float) -> bool:
    """Return whether a float is finite, or an integer has at most 64 bits."""
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63
