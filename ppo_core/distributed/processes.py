"""What a process of a training owes to the one that started it: its end, and the reason."""

import ctypes
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
"""Environment variable: id of the process that this one was started by and ends with."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: where a process writes why it failed; torchrun sets it, and shows that."""

_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def end_with_parent() -> None:
    """From here on the kernel kills this process when the one that started it has ended.

    That leaves no orphan that goes on training, and writing, where its launcher was killed. It
    holds under torchrun and where PARENT is set, and on Linux alone; another system has no such
    promise of the kernel.
    """
    started_by = os.environ.get(PARENT)
    if sys.platform != "linux" or (started_by is None and _UNDER_TORCHRUN not in os.environ):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # It may have ended before the call, which then promises nothing.
    if started_by is not None and os.getppid() != int(started_by):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """Why a process failed, in its own words."""

    kind: str
    """Name of the error's class."""

    message: str
    """What the error says."""

    traceback: str
    """Where it was raised."""

    time: float
    """When, in seconds since 1970."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """An error is written to the file that ERROR_FILE names, if it names one, and raised on."""
    try:
        yield
    except Exception as error:
        if path := os.environ.get(ERROR_FILE):
            _write_report(Path(path), error)
        raise


def read_report(path: Path) -> ErrorReport | None:
    """What `reported_errors` wrote; None where a process had no time to say anything."""
    if not path.is_file():
        return None
    said = json.loads(path.read_text(encoding="utf-8"))["message"]
    more = said["extraInfo"]
    return ErrorReport(
        kind=more["kind"],
        message=more["text"],
        traceback=more["py_callstack"],
        time=more["time"],
    )


def _write_report(path: Path, error: Exception) -> None:
    now = time.time()
    # The form that torchrun reads, with more in extraInfo.
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
