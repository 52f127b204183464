"""Read settings from command-line flags, or from a TOML or JSON file with the flags' names."""

import ast
import inspect
import math
import re
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from transformers import HfArgumentParser

from ppo_core.config.field_checks import check_type, refuse_secrets
from ppo_core.config.trl_names import PPO_ALIASES
from ppo_core.config.unsupported_settings import (
    INSTEAD,
    NO_EFFECT,
    Unsupported,
    refuse_unsupported,
)
from ppo_core.errors import ConfigError
from ppo_core.io.text_files import parse_strict_json, read_json_file, read_toml_file

NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
"""Negative numbers, which are values and not flags; argparse's own pattern does not match -1e-5."""

MAY_BE_SECRET = ("hub_token",)
"""Settings that may contain a secret, because they are never stored or logged."""


def parse_arguments(kinds: Sequence[type], argv: Sequence[str]) -> list[Any]:
    """Return one instance of each dataclass in `kinds`, read from command-line arguments.

    The first argument may be a TOML file with one flag per line; flags after the file override the
    lines of the file. A JSON file must be the only argument. A value may be null only in JSON.

    Raises:
        ConfigError: a flag, a value or the file is invalid, or a value other than hub_token
            contains a secret.
        SystemExit: --help was given; the help has been printed.
    """
    if argv and argv[0].endswith(".json"):
        if len(argv) > 1:
            raise ConfigError(
                f"{argv[1]!r} follows '{argv[0]}', a JSON file. Flags can follow only a TOML file. "
                "Write all settings into the JSON file, or write a TOML file, NAME = VALUE a line."
            )
        return _read_json(kinds, Path(argv[0]))
    parser = DocumentedParser(
        kinds,
        prog="python -m ppo_core",
        usage="%(prog)s [SETTINGS.toml] [--name value ...]",
        aliases=PPO_ALIASES,
        instead=INSTEAD,
        no_effect=NO_EFFECT,
    )
    if argv and not argv[0].startswith("-"):
        argv = [*_flags_of_file(Path(argv[0])), *argv[1:]]
    return parser.parse(argv)


class DocumentedParser(HfArgumentParser):
    """An `HfArgumentParser` that shows field docstrings as help, and raises ConfigError."""

    def __init__(
        self,
        kinds: Sequence[type],
        *,
        prog: str,
        usage: str,
        aliases: Mapping[str, str] | None = None,
        instead: Unsupported | None = None,
        no_effect: Collection[str] = (),
    ) -> None:
        """Add one flag for each field of the dataclasses.

        Args:
            kinds: the dataclasses.
            prog: name of the command, for the help and for errors.
            usage: usage line of the help.
            aliases: alternative name of a flag -> name of its field.
            instead: flags that are refused with advice, see `refuse_unsupported`.
            no_effect: flags in `instead` that are logged instead of refused.
        """
        self._kinds = kinds
        self._instead = instead or {}
        self._no_effect = no_effect
        self._aliases = aliases or {}
        self._field_docs = {name: doc for kind in kinds for name, doc in field_docs(kind).items()}
        self._field_defaults = {
            field.name: field.default for kind in kinds for field in fields(kind)
        }
        self._field_types = {
            name: hint for kind in kinds for name, hint in get_type_hints(kind).items()
        }
        super().__init__(
            kinds,  # type: ignore[arg-type]
            prog=prog,
            usage=usage,
            allow_abbrev=False,
        )
        self._negative_number_matcher = NEGATIVE_NUMBER

    def parse(self, argv: Sequence[str]) -> list[Any]:
        """Return one instance of each dataclass, read from flags only.

        An unknown flag is reported before a missing required flag, because the unknown flag may be
        a misspelling of the required flag.

        Raises:
            ConfigError: a flag is unknown or missing, or a value is invalid or contains a secret.
            SystemExit: --help was given; the help has been printed.
        """
        namespace, rest = self.parse_known_args(list(argv))
        unknown = _read_flags(rest, self.prog)
        refuse_secrets(unknown)
        refuse_unsupported(
            unknown, [*self._field_docs], self._instead, no_effect=self._no_effect, prefix="--"
        )
        given = vars(namespace)
        if missing := [f"--{name}" for name in self._field_docs if name not in given]:
            self.error(f"the following flags are required: {', '.join(missing)}")
        parsed = [
            kind(**{field.name: given[field.name] for field in fields(kind)})
            for kind in self._kinds
        ]
        for settings in parsed:
            refuse_secrets(vars(settings), allowed=MAY_BE_SECRET)
        return parsed

    def add_argument(self, *flags: str, **options: Any) -> Any:
        """Add a flag as argparse does, with the field's docstring as help, and with aliases."""
        name = flags[0].lstrip("-")
        if name in self._field_docs:
            aliases = [f"--{alias}" for alias, meant in self._aliases.items() if meant == name]
            flags = (*flags, *aliases)
            options["help"] = self._help(name, aliases)
            # `parse` itself reports missing flags, after unknown flags.
            options.pop("required", None)
            # HfArgumentParser drops the default of a field whose value may be a list.
            options.setdefault("default", self._default(name))
            if options.get("type") is int:
                options["type"] = _whole_number
            elif {float, str} <= {*get_args(self._field_types[name])}:
                options["type"] = _number_or_word
            elif bool in get_args(self._field_types[name]):
                # As for a field of type bool, the flag without a value means True.
                options |= {"nargs": "?", "const": True}
        elif name.startswith("no_"):
            options["help"] = f"Turn {options['dest']} off."
        return super().add_argument(*flags, **options)

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError; argparse would print the message and exit.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message}. See {self.prog} --help.")

    def _default(self, name: str) -> object:
        default = self._field_defaults[name]
        # With SUPPRESS, a flag that is not given is missing from the namespace.
        return SUPPRESS if default is MISSING else default

    def _help(self, name: str, aliases: Sequence[str]) -> str:
        required = " Required." if self._default(name) is SUPPRESS else ""
        also = f" Also {', '.join(aliases)}." if aliases else ""
        return self._field_docs[name].replace("%", "%%") + required + also


def field_docs(kind: type) -> dict[str, str]:
    """Return field name -> docstring on one line, for a dataclass; inherited fields come first.

    A field without a docstring is left out.
    """
    docs: dict[str, str] = {}
    for owner in reversed([each for each in kind.__mro__ if is_dataclass(each)]):
        definition = ast.parse(inspect.getsource(owner)).body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    docs[name] = " ".join(doc.split())
    return docs


def _read_json(kinds: Sequence[type], path: Path) -> list[Any]:
    settings = read_json_file(path, ConfigError)
    if not isinstance(settings, dict):
        raise ConfigError(
            f"'{path}' holds a {type(settings).__name__}, not a JSON object. Write the settings as "
            'an object of names and values: {"name": value}.'
        )
    known = [name for kind in kinds for name in field_docs(kind)]
    refuse_secrets(settings, allowed=MAY_BE_SECRET)
    others = {name: value for name, value in settings.items() if name not in known}
    refuse_unsupported(others, known, no_effect=NO_EFFECT)
    return [_read_object(kind, settings) for kind in kinds]


def _read_object(kind: type, settings: Mapping[str, Any]) -> Any:
    types = get_type_hints(kind)
    values = {name: settings[name] for name in field_docs(kind) if name in settings}
    for name, value in values.items():
        check_type(types[name], value, name)
    return kind(**values)


def _flags_of_file(path: Path) -> list[str]:
    settings = read_toml_file(path, ConfigError)
    flags = []
    for name, value in settings.items():
        if isinstance(value, dict):
            raise ConfigError(
                f"'{path}' has a table [{name}], and settings have no tables. Write one line "
                "name = value for each setting."
            )
        several = isinstance(value, list)
        if any("\0" in str(one) for one in (value if several else [value])):
            raise ConfigError(f"{name}={value!r:.80} in '{path}' has a null character. Remove it.")
        flags += [f"--{name}", *map(str, value)] if several else [f"--{name}={value}"]
    return flags


def _read_flags(words: Sequence[str], prog: str) -> dict[str, Any]:
    """Return name -> value of flags unknown to all dataclasses; a flag without a value is True."""
    given: dict[str, list[str]] = {}
    for word in words:
        if re.match("--?[a-zA-Z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            last = given[name.replace("-", "_")] = [value] if equals else []
        elif given:
            last.append(word)
        else:
            raise ConfigError(f"'{word}' belongs to no flag. For all flags, run {prog} --help.")
    return {name: _read_value(values) for name, values in given.items()}


def _read_value(words: Sequence[str]) -> object:
    if len(words) != 1:
        return list(words) or True
    try:
        return parse_strict_json(words[0].lower())
    except ValueError:
        return words[0]


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _whole_number(text: str) -> int:
    """Return a flag's value as an integer; 3.0 and 1e5 count as integers."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value.is_integer():
        raise ArgumentTypeError(f"invalid int value: {text!r}")
    return int(value)
