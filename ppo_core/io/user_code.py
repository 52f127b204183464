"""Load functions from a user's files and modules."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ppo_core.errors import ConfigError, user_code_errors
from ppo_core.io.folder_cache import digest_of, digest_of_file


@dataclass(frozen=True, kw_only=True)
class LoadedFunction:
    """A function from a user's file or module."""

    function: Callable[..., Any]

    version: str
    """Digest of the file or module that the user named."""


def load_function(place: str, takes: str) -> LoadedFunction:
    """Return the function `FILE_OR_MODULE:FUNCTION`; a name that ends in `.py` is a file.

    `takes` describes the arguments of the function, for an error message.

    Raises:
        ConfigError: the file, module or function does not exist or cannot be imported, or the
            module has no source file.
    """
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ConfigError("it names no function. Write python:FILE_OR_MODULE:FUNCTION.")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{where} has no function '{name}'. Write one that takes {takes}.")
    return LoadedFunction(function=function, version=_version_of(module))


def require_call(function: Callable[..., Any], call: str, form: str, /, **columns: object) -> None:
    """Check that a function can be called with two lists, and with columns by keyword.

    Args:
        function: function of a user.
        call: description of the call, such as "the function is called with two lists".
        form: how to write the function, for the message, such as "reward(prompts, responses)".
        **columns: arguments that the function gets by keyword.

    Raises:
        ConfigError: the function takes other arguments.
    """
    try:
        signature = inspect.signature(function)
    # A function written in C may have no signature. The first call then checks the arguments.
    except (TypeError, ValueError):
        return
    try:
        signature.bind([], [], **columns)
    except TypeError as error:
        raise ConfigError(f"{call}, but takes {signature}: {error}. Write it as {form}.") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"the file {path.absolute()} does not exist. Pass the path of an existing file."
        )
    # A unique name, because an imported module may already have the name of the file.
    name = f"{path.stem}_{digest_of([str(path.absolute()), digest_of_file(path)])}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # `dataclass` looks up the module of the decorated class in `sys.modules`.
    sys.modules[name] = module
    try:
        with _import_errors(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    with _import_errors(name):
        return importlib.import_module(name)


@contextmanager
def _import_errors(name: str) -> Iterator[None]:
    """Raise the errors of importing a user's module as ConfigError."""
    try:
        with user_code_errors(ConfigError, f"Importing {name}"):
            yield
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, ImportError | SyntaxError):
            # The text of the cause names the missing module, or the wrong line.
            raise ConfigError(f"{name} cannot be imported: {cause}.") from cause
        raise


def _version_of(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    if file is None:
        raise ConfigError(
            f"{module.__name__} is part of Python and has no source file, so the version of the "
            "function would be unknown. Call the function from a file of your own."
        )
    return digest_of_file(Path(file))[:16]
