"""Settings that scripts create: refuse unsupported names, and allow assignments."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from ppo_core.config.unsupported_settings import (
    INSTEAD,
    NO_EFFECT,
    Unsupported,
    refuse_unsupported,
)
from ppo_core.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings")
Copied = TypeVar("Copied", bound="DataclassInstance")

_IS_COPIED, _IS_OWN = "_is_copied", "_is_own"
"""Attributes that mark a script's settings once a trainer has copied them, and the copy."""

logger = logging.getLogger(__name__)


def refusing_unsupported(
    settings: type[Settings],
    instead: Unsupported = INSTEAD,
    no_effect: Collection[str] = NO_EFFECT,
) -> type[Settings]:
    """Make the constructor of a settings dataclass call `refuse_unsupported`.

    Assignments are checked in the same way, and refused in a trainer's copy (`protect_copy`).

    Raises:
        TypeError: `settings` is not a dataclass.
    """
    supported = [field.name for field in fields(settings)]  # type: ignore[arg-type]
    generated: Callable[..., None] = settings.__init__

    @wraps(generated)
    def init(self: Settings, **given: Any) -> None:
        generated(self, **refuse_unsupported(given, supported, instead, no_effect=no_effect))

    def assign(self: Settings, name: str, value: object) -> None:
        if _IS_OWN in vars(self):
            raise _set_too_late(name, value)
        if _IS_COPIED in vars(self):
            logger.warning(
                "%s=%.80r does not change the existing trainer. Only new trainers use it.",
                name,
                value,
            )
        if refuse_unsupported({name: value}, supported, instead, no_effect=no_effect):
            object.__setattr__(self, name, value)

    def state(self: Settings) -> dict[str, Any]:
        # Omit the marks: they do not hold for an object that `copy` or `pickle` creates.
        return {k: value for k, value in vars(self).items() if k not in (_IS_COPIED, _IS_OWN)}

    settings.__init__ = init  # type: ignore[method-assign, assignment]
    settings.__setattr__ = assign  # type: ignore[method-assign, assignment]
    settings.__getstate__ = state  # type: ignore[method-assign, assignment]
    return settings


def _set_too_late(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"{name}={value!r:.80} was set after the trainer was created, so it has no effect. Set it "
        "before you create the trainer, or create another trainer with "
        f"dataclasses.replace(config, {name}=...)."
    )


def refuse_late_changes(settings: "DataclassInstance", before: Mapping[str, Any]) -> None:
    """Raise if a setting, or an item of a list in a setting, differs from its value in `before`.

    Raises:
        ConfigError: a setting was changed.
    """
    for name, value in asdict(settings).items():
        if value != before[name]:
            raise _set_too_late(name, value)


def protect_copy(copy: Copied, settings: Copied) -> Copied:
    """Refuse assignments to a trainer's copy of a script's settings; return the copy.

    From now on, an assignment to the script's settings logs a warning.
    """
    vars(settings)[_IS_COPIED] = vars(copy)[_IS_OWN] = True
    return copy
