"""Keep secrets out of the data that Metaflow stores: parameters, settings, metadata, exceptions."""

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from metaflow import metaflow_git, task
from metaflow.exception import MetaflowExceptionWrapper

from pipeline.settings.overrides import read_overrides
from ppo_core.config.field_checks import refuse_secrets
from ppo_core.errors.control_characters import escape_controls
from ppo_core.errors.redaction import redact

PARAMETER_VARIABLE = "METAFLOW_RUN_"
"""Prefix of the environment variables from which Metaflow reads parameters."""

SET = f"{PARAMETER_VARIABLE}SET"
"""Environment variable with the values of `--set`, separated by spaces."""

UNREDACTED = "RLHF_UNREDACTED_OUTPUT"
"""Environment variable that turns off the redaction of a scheduler command's output, which only
`flows/deploy.py` reads."""


def keep_secrets_from_metaflow(argv: Sequence[str]) -> None:
    """Refuse secrets on the command line, and redact the data that Metaflow stores by itself.

    Metaflow stores the address of the git remote, which contains a token in many CI jobs, and the
    traceback of a failed step. No setting of Metaflow prevents this, so this function replaces a
    function and a class of Metaflow.

    Args:
        argv: arguments of the command, without the name of the file.

    Raises:
        ConfigError: an argument, or a parameter in the environment, contains a secret.
    """
    from_environment = {
        name: value for name, value in os.environ.items() if name.startswith(PARAMETER_VARIABLE)
    }
    refuse_secrets({**_named(argv), **from_environment})
    refuse_secrets(read_overrides([*_values_of("--set", argv), *os.environ.get(SET, "").split()]))
    metaflow_git.get_repository_info = _redacted(metaflow_git.get_repository_info)
    task.MetaflowExceptionWrapper = redacted_exception


def redacted_exception(error: BaseException) -> Any:
    """Return the record of an exception that Metaflow stores and shows.

    Mask secrets and escape control characters in the record.
    """
    stored = MetaflowExceptionWrapper(error)
    stored.exception = escape_controls(redact(stored.exception))
    stored.stacktrace = stored.stacktrace and escape_controls(redact(stored.stacktrace))
    return stored


def _redacted(read: Any) -> Any:
    def read_redacted(path: str) -> Mapping[str, Any]:
        return {
            name: redact(value) if isinstance(value, str) else value
            for name, value in read(path).items()
        }

    return read_redacted


def _named(argv: Sequence[str]) -> dict[str, str]:
    """Return flag -> its values, joined by spaces.

    An argument before the first flag has the key "argument POSITION".
    """
    values: dict[str, str] = {}
    flag = ""
    for place, word in enumerate(argv, start=1):
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            values[flag] = f"{values.get(flag, '')} {value}".strip()
        elif flag:
            # `--config NAME FILE` has two values, and `--tag` may be repeated.
            values[flag] = f"{values[flag]} {word}".strip()
        else:
            values[f"argument {place}"] = word
    return values


def _values_of(option: str, argv: Sequence[str]) -> list[str]:
    """Return the values of a repeatable option."""
    following = [value for word, value in pairwise(argv) if word == option]
    joined = [word.removeprefix(f"{option}=") for word in argv if word.startswith(f"{option}=")]
    return following + joined
