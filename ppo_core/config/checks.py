"""Checks of settings; the errors name the setting and its value."""

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
