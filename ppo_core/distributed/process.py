"""The life of one process: its imports, its end with its parent, its error report, its exit."""

import atexit
import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ppo_core.data.atomic_files import write_atomically

PARENT = "PPO_CORE_PARENT"
"""Environment variable: id of the process that started this one, which ends with it."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: file for the error report of a process; torchrun sets and shows it."""

_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""

_TIME_FOR_THREADS = 0.1
"""Seconds that gloo's threads get at exit; each needs the GIL for microseconds."""


@contextmanager
def large_imports() -> Iterator[None]:
    """Disable garbage collection during imports and freeze the result, in a command of ours.

    torch, transformers and MLflow create a million objects that live until the process ends, and
    each step of a flow is a process. The collector would traverse them again and again during the
    imports, and once more at exit. Only import inside the block: objects that exist at its end are
    never collected.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def end_with_parent() -> None:
    """Have the kernel kill this process when the process that started it ends.

    So no orphan continues to train and write after its launcher was killed. This applies under
    torchrun and where PARENT is set, on Linux only.
    """
    started_by = os.environ.get(PARENT)
    if sys.platform != "linux" or (started_by is None and _UNDER_TORCHRUN not in os.environ):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # A parent that ended before the call sends no signal.
    if started_by is not None and os.getppid() != int(started_by):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """Why a process failed, as it reported itself."""

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
    """Write an error inside the context to the file that ERROR_FILE names, and raise it again."""
    try:
        yield
    except Exception as error:
        if path := os.environ.get(ERROR_FILE):
            _write_report(Path(path), error)
        raise


def read_report(path: Path) -> ErrorReport | None:
    """Return the report that `reported_errors` wrote; None where the process wrote none."""
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
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(now)),
                "kind": type(error).__name__,
                "text": str(error),
                "time": now,
            },
        }
    }
    write_atomically(path, json.dumps(report))


def let_gloo_finish_at_exit() -> None:
    """Release the GIL to gloo's threads just before this process ends.

    gloo's threads free the tensors of a finished operation shortly after the main thread has
    learned that it is finished, and need the GIL for that. Python before 3.14 terminates a thread
    that waits for the GIL while the interpreter shuts down; a thread in C++ code cannot be
    terminated so, and the process aborts although its work is done: "terminate called without an
    active exception" (pytorch/pytorch#190489). `destroy_process_group` joins these threads only
    where no object, not even a model, refers to the group.
    """
    atexit.unregister(_release_the_gil)
    atexit.register(_release_the_gil)


def _release_the_gil() -> None:
    time.sleep(_TIME_FOR_THREADS)
