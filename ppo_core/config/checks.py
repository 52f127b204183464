"""Checks of settings; the errors name the setting, and its value unless it is a secret."""

import math
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ppo_core.errors import ConfigError
from ppo_core.errors.redaction import describe_secret, names_secret

NO_SECRETS = ("stop_token", "truncate_token", "eos_token", "pad_token")
"""Settings with the name of a secret whose values are none."""


SECRETS_OF_A_RUN = (
    "set it as an environment variable: HF_TOKEN for models and data of the hub, OPENAI_API_KEY "
    "for the judge, VLLM_API_KEY for vLLM, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD "
    "for MLflow"
)
"""Where the secrets of a run belong, for the message of `refuse_secrets`."""


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


def require_kept_checkpoints(config: Any) -> None:
    """Raise if `save_total_limit` of a configuration keeps fewer than two checkpoints.

    Raises:
        ConfigError: it is not None and below 2.
    """
    if config.save_total_limit is None:
        return
    require_count(config, "save_total_limit")
    if config.save_total_limit == 1:
        raise ConfigError(
            "save_total_limit=1 would keep only one checkpoint. If its files were damaged, the run "
            "could not resume. Set save_total_limit to at least 2, or to None to keep all."
        )


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


def refuse_secrets(
    values: Mapping[str, object],
    *,
    allowed: Collection[str] = (),
    instead: str = SECRETS_OF_A_RUN,
) -> None:
    """Raise if a value, also in nested tables and lists, holds a password, key or token.

    A value also counts as secret if its name says so, for example api_key. Settings are stored with
    models, checkpoints and runs, and shown to everyone who reads these.

    Args:
        values: values by the names under which the user gave them.
        allowed: names whose values may hold a secret.
        instead: what to do with a secret that is removed, for the message.

    Raises:
        ConfigError: a value holds a secret; the message names it without showing the secret.
    """
    for name, value in values.items():
        if name in allowed:
            continue
        if describe_secret(name):
            raise ConfigError("The name of a setting holds a secret. Rename or remove the setting.")
        if isinstance(value, Mapping):
            table = {f"{name}.{key}": inner for key, inner in value.items()}
            refuse_secrets(table, instead=instead)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                refuse_secrets({name: inner}, instead=instead)
        elif isinstance(value, str) and (found := _secret_in(name, value)):
            raise ConfigError(
                f"{name} holds {found}, which is not shown here. It would be stored with the run "
                f"and its models. Remove it from {name}, and {instead}."
            )


def _secret_in(name: str, value: str) -> str | None:
    if value and names_secret(name) and name.rpartition(".")[2] not in NO_SECRETS:
        return "a secret, by its name"
    return describe_secret(value)
