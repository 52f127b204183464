"""Check settings; errors name the setting, and its value unless the value is a secret."""

import dataclasses
import math
import os
from collections.abc import Collection, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from ppo_core.errors import ConfigError
from ppo_core.errors.redaction import describe_secret, names_secret
from ppo_core.io.validation import adapter_of, describe_error, describe_fault

NO_SECRETS = ("stop_token", "truncate_token", "eos_token", "pad_token")
"""Settings whose names look like names of secrets, but whose values are not secret."""

SECRETS_OF_A_RUN = (
    "set it as an environment variable: HF_TOKEN for models and data of the hub, OPENAI_API_KEY "
    "for the judge, VLLM_API_KEY for vLLM, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD "
    "for MLflow"
)
"""Advice in the message of `refuse_secrets`: where the secrets of a run belong."""


def require(config: object, name: str, holds: bool, what: str) -> None:
    """Raise unless the setting's value passed its check.

    Args:
        config: the settings.
        name: name of the setting.
        holds: result of the check.
        what: the words after "must be" in the message, such as "at least 1".

    Raises:
        ConfigError: `holds` is False.
    """
    if not holds:
        raise ConfigError(f"{name}={getattr(config, name)!r} must be {what}.")


def check_fields(config: object, kind: type | None = None) -> None:
    """Raise unless numbers, booleans and choices match the types and bounds of their fields.

    Args:
        config: the settings, a dataclass.
        kind: the class whose fields are checked; if None, the class of `config`.

    Raises:
        ConfigError: a value has another type or is out of range, a number is not finite, or an
            integer has more than 64 bits.
    """
    kind = kind or type(config)
    form = _form_of(kind)
    values = {name: getattr(config, name) for name in form.model_fields}
    for name, value in values.items():
        # pydantic would accept a tensor as the number that it contains.
        if hasattr(value, "__float__") and not (isinstance(value, float) or _has_64_bits(value)):
            raise ConfigError(f"{name}={value!r:.80} must be a plain number of at most 64 bits.")
    try:
        form.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0])
        fault = describe_fault(wrong, get_type_hints(kind, include_extras=True)[name])
        raise ConfigError(f"{name}={values[name]!r:.80} {fault}.") from None


@cache
def _form_of(kind: type) -> type[BaseModel]:
    """Return a pydantic model of a dataclass's fields that are numbers, booleans or choices."""
    hints = get_type_hints(kind, include_extras=True)
    fields: dict[str, Any] = {
        name: hints[name] for name, hint in get_type_hints(kind).items() if _is_scalar(hint)
    }
    config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())
    return create_model(kind.__name__, __config__=config, **fields)


def _is_scalar(hint: Any) -> bool:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = (int, float, bool, NoneType)
    return all(one in plain or get_origin(one) is Literal for one in kinds)


def require_kept_checkpoints(config: Any) -> None:
    """Raise if `save_total_limit` of a configuration keeps only one checkpoint.

    Raises:
        ConfigError: `save_total_limit` is 1.
    """
    if config.save_total_limit == 1:
        raise ConfigError(
            "save_total_limit=1 would keep only one checkpoint. If its files were damaged, the run "
            "could not resume. Set save_total_limit to at least 2, or to None to keep all."
        )


def check_key(variable: str) -> None:
    """Raise if an environment variable holds a key that an HTTP header cannot carry.

    White space around the key is allowed, because the clients remove it.

    Raises:
        ConfigError: the key has a character that is not ASCII, or a control character.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{variable} holds characters that an HTTP header cannot carry. Set {variable} to the "
            "key alone, on one line."
        )


def check_type(kind: Any, value: object, name: str) -> None:
    """Raise unless the value of a setting, read from a file, has the type of its field.

    Args:
        kind: the type as annotated.
        value: the value, which is not converted, so it can be written back unchanged.
        name: full name of the setting.

    Raises:
        ConfigError: the value has another type, or is a text with a null character, which no path
            may contain.
    """
    try:
        adapter_of(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise ConfigError(f"{describe_error(error, name)}.") from None
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name}={value!r:.80} has a null character. Remove it.")


def changed(config: Any) -> list[str]:
    """Return the names of a dataclass's settings that differ from their defaults."""
    settings = dataclasses.fields(config)
    return [one.name for one in settings if getattr(config, one.name) != one.default]


def is_finite(value: float) -> bool:
    """Return whether a number is a finite float, or an integer of at most 64 bits."""
    return math.isfinite(value) if isinstance(value, float) else _has_64_bits(value)


def _has_64_bits(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 2**63


def refuse_secrets(
    values: Mapping[str, object],
    *,
    allowed: Collection[str] = (),
    instead: str = SECRETS_OF_A_RUN,
) -> None:
    """Raise if a value, also in nested tables and lists, contains a password, key or token.

    The text of a setting also counts as secret if the setting has the name of a secret, for example
    api_key. Settings are stored with models, checkpoints and runs, and everyone with access to a
    run can read its settings.

    Args:
        values: name of a setting, as the user gave it -> value.
        allowed: names whose values may contain a secret.
        instead: advice in the message, about where the secret belongs.

    Raises:
        ConfigError: a value or a name contains a secret; the message does not show the secret.
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
                f"{name} holds {found}. The value is not shown here. It would be stored with the "
                f"run and its models. Remove it from {name}, and {instead}."
            )


def _secret_in(name: str, value: str) -> str | None:
    if value and names_secret(name) and name.rpartition(".")[2] not in NO_SECRETS:
        return "a secret, judging by its name"
    return describe_secret(value)
