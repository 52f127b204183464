"""Checks of settings, with errors that name the setting and its value."""

from ppo_core.errors import ConfigError


def require(config: object, name: str, holds: bool, what: str) -> None:
    """Raise if a check of a setting failed.

    Raises:
        ConfigError: `holds` is False; the message gives the name, the value and `what`.
    """
    if not holds:
        raise ConfigError(f"{name}={getattr(config, name)!r} must be {what}.")


def require_count(config: object, name: str) -> None:
    """Raise if a setting is not an integer of at least 1.

    Raises:
        ConfigError: the value is not an integer, or is below 1.
    """
    value = getattr(config, name)
    require(config, name, isinstance(value, int) and value >= 1, "a whole number, at least 1")
