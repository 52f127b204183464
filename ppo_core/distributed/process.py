"""Set up a process: fast imports, end with the parent process, error reports, clean exit."""

import atexit
import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ppo_core.errors.redacted_output import install_redaction
from ppo_core.errors.redaction import redact
from ppo_core.io.atomic_files import write_atomically

PARENT = "PPO_CORE_PARENT"
"""Environment variable with the parent's process id; this process ends when the parent ends."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable, set by torchrun, with the path of a process's error report."""

STACKS = "PPO_CORE_STACKS"
"""Environment variable with the folder for the stacks of this process's threads, see
`write_stacks_on_request`."""

_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""

_TIME_FOR_THREADS = 0.1
"""Seconds to wait at exit for gloo's threads, each of which needs the GIL for microseconds."""


@contextmanager
def large_imports() -> Iterator[None]:
    """Disable garbage collection during imports, and freeze the imported objects.

    torch, transformers and MLflow create a million objects that live until the process ends. The
    collector would traverse them many times during the imports, and again at exit. Each step of a
    flow would pay this cost, because each step is a process. Do nothing but import inside the
    block: objects that exist when the block ends are never collected.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def is_main_process() -> bool:
    """Return whether this process has rank 0, by the variable RANK of torchrun and accelerate."""
    return os.environ.get("RANK", "0") == "0"


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent process ends.

    So no orphan can continue to train and write after its launcher was killed. The function has an
    effect only on Linux, and only under torchrun or if the variable PARENT is set.
    """
    started_by = os.environ.get(PARENT)
    if sys.platform != "linux" or (started_by is None and _UNDER_TORCHRUN not in os.environ):
        return
    end_with(os.getppid() if started_by is None else int(started_by))


def end_with(parent: int) -> None:
    """On Linux, have the kernel kill this process when its parent, process id `parent`, ends."""
    _set_death_signal(signal.SIGKILL)
    # A parent that ended before the call sends no signal.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """On Linux, undo `end_with`."""
    _set_death_signal(0)


def _set_death_signal(number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_DEATH_SIGNAL, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def stacks_file(folder: Path, rank: str) -> Path:
    """Return the file in which `write_stacks_on_request` writes the stacks of a process."""
    return folder / f"stacks-{rank}.txt"


def write_stacks_on_request() -> None:
    """On SIGUSR1, write the stack of each thread to a file in the folder that STACKS names.

    Without the variable nothing is changed. The stacks are written even while native code runs.
    """
    if folder := os.environ.get(STACKS):
        file = stacks_file(Path(folder), os.environ.get("RANK", "0")).open("w")
        faulthandler.register(signal.SIGUSR1, file)  # keeps the file open


def quiet_libraries() -> None:
    """Silence messages that need no action by a user; call before the libraries are imported."""
    # bitsandbytes reports that it does not use a kernel from the hub.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        # This variable also disables transformers' progress bars for reading and writing weights.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def name_log_levels() -> None:
    """Let loggers without a handler write the level before each message, such as `WARNING: `."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))


def prepare_command() -> None:
    """Prepare the process of a command that trains or samples; call before the large imports."""
    install_redaction()
    end_with_parent()
    write_stacks_on_request()
    quiet_libraries()
    name_log_levels()


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """The error of a failed process, as the process itself reported it."""

    kind: str
    """Name of the error's class."""

    message: str
    """Message of the error."""

    traceback: str
    """Traceback of the error."""

    time: float
    """Time of the error, in seconds since 1970."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Write an error of the context to the file that ERROR_FILE names, and re-raise the error."""
    try:
        yield
    except Exception as error:
        if path := os.environ.get(ERROR_FILE):
            _write_report(Path(path), error)
        raise


def read_report(path: Path) -> ErrorReport | None:
    """Return the report that `reported_errors` wrote; None if there is no report."""
    if not path.is_file():
        return None
    details = json.loads(path.read_text(encoding="utf-8"))["message"]["extraInfo"]
    return ErrorReport(
        kind=details["kind"],
        message=details["text"],
        traceback=details["py_callstack"],
        time=details["time"],
    )


def _write_report(path: Path, error: Exception) -> None:
    now = time.time()
    # The format that torchrun reads, with additional entries in extraInfo.
    report = {
        "message": {
            "message": redact(f"{type(error).__name__}: {error}"),
            "extraInfo": {
                "py_callstack": redact("".join(traceback.format_exception(error))),
                "timestamp": str(int(now)),
                "kind": type(error).__name__,
                "text": redact(error),
                "time": now,
            },
        }
    }
    try:
        write_atomically(path, json.dumps(report))
    except OSError as write_error:  # a full disk may also have caused `error`
        print(f"The error report could not be written: {write_error}", file=sys.stderr)


def let_gloo_finish_at_exit() -> None:
    """Release the GIL to gloo's threads just before this process ends.

    gloo's threads need the GIL to free the tensors of an operation, shortly after the main thread
    sees the operation as finished. Python before 3.14 terminates threads that wait for the GIL at
    shutdown. Terminating a thread in C++ code aborts the process, although its work is done:
    "terminate called without an active exception" (pytorch/pytorch#190489).
    `destroy_process_group` joins these threads only if no object, for example a model, refers to
    the group.
    """
    atexit.unregister(_release_the_gil)
    atexit.register(_release_the_gil)


def _release_the_gil() -> None:
    time.sleep(_TIME_FOR_THREADS)
