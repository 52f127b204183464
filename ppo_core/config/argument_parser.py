"""Read settings from command-line flags, or from a TOML or JSON file with the flags' names."""

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from transformers import HfArgumentParser

from ppo_core.config.checks import check_type, refuse_secrets
from ppo_core.config.text_files import parse_strict_json, read_json_file, read_toml_file
from ppo_core.config.unsupported_settings import refuse_unsupported
from ppo_core.errors import ConfigError

MAY_BE_SECRET = ("hub_token",)
"""Settings that are never stored or logged."""


def parse_arguments(kinds: Sequence[type], argv: Sequence[str]) -> list[Any]:
    """Return one instance of each dataclass in `kinds`, read from command-line arguments.

    The first argument may be a TOML file with one flag per line; flags after the file override its
    lines. A JSON file must be the only argument; its values may be null, unlike those of flags.

    Raises:
        ConfigError: a flag, a value or the file is invalid, or a value other than hub_token holds
            a secret.
        SystemExit: --help was given; the help has been printed.
    """
    if len(argv) == 1 and argv[0].endswith(".json"):
        return _read_json(kinds, Path(argv[0]))
    parser = DocumentedParser(
        kinds, prog="python -m ppo_core", usage="%(prog)s [SETTINGS.toml] [--name value ...]"
    )
    if argv and not argv[0].startswith("-"):
        argv = [*_flags_of_file(Path(argv[0])), *argv[1:]]
    *parsed, rest = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    unknown = _read_flags(rest)
    refuse_secrets(unknown)
    refuse_unsupported(unknown, [name for kind in kinds for name in field_docs(kind)])
    return _without_secrets(parsed)


class DocumentedParser(HfArgumentParser):
    """`HfArgumentParser` with field docstrings as help, which raises ConfigError on errors."""

    def __init__(self, kinds: Sequence[type], *, prog: str, usage: str) -> None:
        """Add one flag for each field of the dataclasses; the help prints `prog` and `usage`."""
        self._field_docs = {name: doc for kind in kinds for name, doc in field_docs(kind).items()}
        self._field_defaults = {
            field.name: field.default for kind in kinds for field in fields(kind)
        }
        super().__init__(
            kinds,  # type: ignore[arg-type]
            prog=prog,
            usage=usage,
            allow_abbrev=False,
        )

    def parse(self, argv: Sequence[str]) -> list[Any]:
        """Return one instance of each dataclass, read from flags only.

        Raises:
            ConfigError: a flag is unknown, or a value is invalid or holds a secret.
            SystemExit: --help was given; the help has been printed.
        """
        *parsed, rest = self.parse_args_into_dataclasses(
            list(argv), return_remaining_strings=True, look_for_args_file=False
        )
        if rest:
            if rest[0].startswith("--"):
                refuse_secrets(_read_flags(rest))
            raise ConfigError(f"Unknown: {' '.join(rest)}. For all flags, run {self.prog} --help.")
        return _without_secrets(parsed)

    def add_argument(self, *flags: str, **options: Any) -> Any:
        """Add a flag as argparse does, with the docstring of its field as help."""
        name = flags[0].lstrip("-")
        if name in self._field_docs:
            options["help"] = self._field_docs[name].replace("%", "%%")
            # HfArgumentParser drops the default of a field whose value may be a list.
            options.setdefault("default", self._field_defaults[name])
        elif name.startswith("no_"):
            options["help"] = f"Turn {options['dest']} off."
        return super().add_argument(*flags, **options)

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError, where argparse would print the message and exit.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message}. See {self.prog} --help.")


def field_docs(kind: type) -> dict[str, str]:
    """Return name -> one-line docstring of each field of a dataclass, inherited fields first."""
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
    refuse_unsupported({n: value for n, value in settings.items() if n not in known}, known)
    return [_read_object(kind, settings) for kind in kinds]


def _read_object(kind: type, settings: Mapping[str, Any]) -> Any:
    """Return an instance of a dataclass with those of the settings that are its fields."""
    types = get_type_hints(kind)
    values = {name: settings[name] for name in field_docs(kind) if name in settings}
    for name, value in values.items():
        check_type(types[name], value, name)
    return kind(**values)


def _without_secrets(parsed: Sequence[Any]) -> list[Any]:
    """Return the settings; raise if one holds a secret, except hub_token, which is not stored."""
    for settings in parsed:
        refuse_secrets(vars(settings), allowed=MAY_BE_SECRET)
    return list(parsed)


def _flags_of_file(path: Path) -> list[str]:
    settings = read_toml_file(path, ConfigError)
    flags = []
    for name, value in settings.items():
        if isinstance(value, dict):
            raise ConfigError(
                f"'{path}' has a table [{name}], and settings have no tables. Write one line "
                "name = value for each setting."
            )
        if "\0" in str(value):
            raise ConfigError(f"{name}={value!r:.80} in '{path}' has a null character. Remove it.")
        several = isinstance(value, list)
        flags += [f"--{name}", *map(str, value)] if several else [f"--{name}={value}"]
    return flags


def _read_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return name -> value of flags unknown to all dataclasses; a flag without a value is True."""
    given: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            last = given[name.replace("-", "_")] = [value] if equals else []
        elif given:
            last.append(word)
        else:
            raise ConfigError(
                f"'{word}' belongs to no flag. For all flags, run python -m ppo_core --help."
            )
    return {name: _read_value(values) for name, values in given.items()}


def _read_value(words: Sequence[str]) -> object:
    if len(words) != 1:
        return list(words) or True
    try:
        return parse_strict_json(words[0].lower())
    except ValueError:
        return words[0]
