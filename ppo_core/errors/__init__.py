"""Exceptions of this project, and the conversion of errors from libraries and users' code."""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppo_core.errors.control_characters import escape_controls
from ppo_core.errors.redaction import redact

MAX_REASON_CHARACTERS = 300
"""Maximum length of another error's text within an error of the project."""

_NOT_THE_USERS = (
    os.path.join(sysconfig.get_path("stdlib"), ""),
    os.path.join(sysconfig.get_path("purelib"), ""),
    os.path.join(Path(__file__).parents[1], ""),
    os.path.join(Path(__file__).parents[2], "flows", ""),
    "<",
)
"""Prefixes of the file paths of Python, of packages and of this project."""


class PPOError(Exception):
    """Base of the exceptions of this project.

    The messages contain no password, key or token, and no control character except line break and
    tab.
    """

    def __init__(self, *args: object) -> None:
        """Redact and escape the message, which may quote addresses and messages of libraries."""
        super().__init__(
            *(escape_controls(redact(arg)) if isinstance(arg, str) else arg for arg in args)
        )


class ConfigError(PPOError, ValueError):
    """A setting, or a combination of settings, is invalid."""


class DataError(PPOError, ValueError):
    """A data set, a column or a row cannot be used."""


class ModelError(PPOError, ValueError):
    """A model or tokenizer cannot be used in its role."""


class TrainingError(PPOError, RuntimeError):
    """Training cannot continue, for example after repeated non-finite losses."""


class NotFiniteError(TrainingError):
    """The loss or its gradient is infinite or NaN, so the weights are unusable."""


class RunInterruptedError(PPOError, RuntimeError):
    """Training was stopped by a signal and can resume from its last checkpoint."""


class ProcessError(PPOError, RuntimeError):
    """A process of a run died or stopped responding; a retry resumes from the last checkpoint."""


class StorageError(PPOError, RuntimeError):
    """The transfer of a file failed temporarily; a retry continues the transfer."""


class JudgeError(PPOError, RuntimeError):
    """An LLM judge cannot be called, or its budget is spent."""


@contextmanager
def library_errors(kind: type[PPOError], failure: str, next_move: str) -> Iterator[None]:
    """Raise every error of the block as `kind`, with the message "FAILURE: REASON. NEXT_MOVE".

    Use this for calls of libraries that parse files from outside. A PPOError passes unchanged. If
    memory is full, raise a TrainingError, because neither file nor model is wrong.
    """
    try:
        yield
    except PPOError:
        raise
    # The parsers raise DatasetsError, ArrowException, HfHubHTTPError, and KeyError, TypeError or
    # RecursionError for damaged input. Exception is the only base class of all of them.
    except Exception as error:
        # Imported here, because `out_of_memory` imports this module.
        from ppo_core.errors.out_of_memory import full_memory

        full = full_memory(error, "Use a GPU with more memory, or a smaller model.")
        raise full or kind(f"{failure}: {reason_of(error)}. {next_move}") from error
    # A Rust library, such as tokenizers, raises a panic as a BaseException whose class cannot be
    # imported.
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{failure}: {reason_of(error)}. {next_move}") from error


@contextmanager
def user_code_errors(kind: type[PPOError], code: str) -> Iterator[None]:
    """Raise every error of the block, which calls a user's code, as `kind`.

    The message names the code, the error, and the line of the user's file that raised the error. A
    PPOError passes unchanged.
    """
    try:
        yield
    except PPOError:
        raise
    # A user's code may raise anything, and `sys.exit` in it must not end our process as a success.
    except (Exception, SystemExit) as error:
        raise kind(
            f"{code} raised {type(error).__name__} in {_place_of(error)}: {_text_of(error)}. "
            "Correct it, and run again."
        ) from error


def reason_of(error: BaseException) -> str:
    """Return the text of an error, or of its cause if it has one, as one line without secrets."""
    return _text_of(error.__cause__ or error)


def _text_of(error: BaseException) -> str:
    try:
        # Redact before the text is cut, because a part of a secret would not be recognized.
        text = " ".join(redact(error).split()).rstrip(".")
    # `str` calls a method of the error's class, which may be a user's class and may fail.
    except Exception:
        text = ""
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    return text[:MAX_REASON_CHARACTERS] or type(error).__name__


def _place_of(error: BaseException) -> str:
    """Return the place where the user's code raised an error: "FILE:LINE (FUNCTION)"."""
    calls = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    of_user = [call for call in calls if not call[0].startswith(_NOT_THE_USERS)]
    file, line, function = (of_user or calls)[-1]
    return f"{file}:{line} ({function})"
