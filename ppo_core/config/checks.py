"""Checks of settings, with errors that name the setting and its value."""

from ppo_core.errors import ConfigError


def require(config: object, name: str, holds: bool, what: str) -> None:
    """Refuse a setting that is not what it must be.

    Raises:
        ConfigError: `holds` is False; the message gives the name, the value and `what`.
    """
    if not holds:
        raise ConfigError(f"{name}={getattr(config, name)!r} must be {what}.")


def require_count(config: object, name: str) -> None:
    """Refuse a setting that is not a whole number of at least 1.

    Raises:
        ConfigError: it is not.
    """
    value = getattr(config, name)
    require(config, name, isinstance(value, int) and value >= 1, "a whole number, at least 1")
