"""TRL's parser of a script's settings."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from ppo_core.config.argument_parser import NEGATIVE_NUMBER
from ppo_core.config.unsupported_settings import INSTEAD, NO_EFFECT, refuse_unsupported
from ppo_core.errors import ConfigError
from ppo_core.io.text_files import read_text_file

CONFIG = "--config"


class TrlParser(HfArgumentParser):
    """Reads dataclasses of settings from flags, and from the YAML file that `--config` names."""

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """Return one object of each dataclass; flags override the values of the file.

        The mapping `env` of the file sets environment variables. With `return_remaining_strings`,
        the last item of the result lists the unknown flags and the unknown names of the file.

        Raises:
            ConfigError: the file cannot be read, or a name in it is unknown or not supported.
        """
        words = list(sys.argv[1:] if args is None else args)
        if equals := [word for word in words if word.startswith(f"{CONFIG}=")]:
            place = words.index(equals[0])
            words[place : place + 1] = equals[0].split("=", maxsplit=1)
        values: dict[str, Any] = {}
        if CONFIG in words:
            place = words.index(CONFIG)
            values = _read_yaml(words[place + 1] if words[place + 1 :] else "")
            del words[place : place + 2]
        given = values.pop("env", None)
        variables = {} if given is None else given
        if not isinstance(variables, dict):
            # Do not quote the value, because it may be a password.
            raise ConfigError(
                f"env is a {type(variables).__name__}, not a mapping of environment variables. "
                "Write a line such as `NAME: VALUE` below `env:`."
            )
        os.environ |= {str(name): str(value) for name, value in variables.items()}
        known = {action.dest for action in self._actions}
        for action in self._actions:
            # --x and --no_x have the same dest, and argparse takes the default of the first.
            if action.dest in values:
                action.default, action.required = values[action.dest], False
        unknown = {name: value for name, value in values.items() if name not in known}
        if fail_with_unknown_args and not return_remaining_strings:
            refuse_unsupported(unknown, known, INSTEAD, no_effect=NO_EFFECT)
        self._negative_number_matcher = NEGATIVE_NUMBER
        parsed: tuple[Any, ...] = self.parse_args_into_dataclasses(
            words, return_remaining_strings=return_remaining_strings
        )
        if return_remaining_strings:
            *settings, remaining = parsed
            return (*settings, [*unknown, *remaining])
        return parsed


def _read_yaml(file: str) -> dict[str, Any]:
    text = read_text_file(Path(file), ConfigError)
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file!r} is not YAML: {error}. Correct the file.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file!r} has no table of settings. Write lines such as `seed: 1`.")
    return {str(name): value for name, value in values.items()}
