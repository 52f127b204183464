"""Which process ended a training, and the error that says why."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path

from ppo_core import errors
from ppo_core.distributed.interruption import EXIT_CODE
from ppo_core.distributed.processes import ErrorReport, read_report
from ppo_core.errors import PPOError, ProcessError, RunInterruptedError


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The process that ended a training."""

    rank: int
    """Its number among all; -1 for torchrun itself."""

    pid: int
    """Its id on its machine."""

    exit_code: int
    """What it ended with; below 0 a signal."""

    report: ErrorReport | None
    """What it said itself, if it could."""


def ended_alone(pid: int, code: int, reason: Path) -> Ended:
    """Return how the only process of a training ended; it may have written `reason`."""
    return Ended(rank=0, pid=pid, exit_code=code, report=read_report(reason))


def first_ended(pid: int, code: int, reason: Path) -> Ended:
    """Return which of several processes ended first, by the file `reason` that torchrun writes.

    Without that file it was torchrun itself, the process `pid`.
    """
    if not reason.is_file():
        return Ended(rank=-1, pid=pid, exit_code=code, report=None)
    said = json.loads(reason.read_text(encoding="utf-8"))
    report = said.pop("report")
    return Ended(**said, report=report and ErrorReport(**report))


def as_error(ended: Ended, frozen: list[str], folder: Path) -> PPOError:
    """What ended a training, whose checkpoints are in `folder`; `frozen` names what was killed."""
    who = f"Process {ended.rank} (pid {ended.pid})" if ended.rank >= 0 else "torchrun"
    further = f"A further attempt goes on from the last checkpoint in {folder}."
    if frozen:
        return ProcessError(
            f"{frozen[0]} of the training was frozen: something stopped it (SIGSTOP) and did not "
            f"let it go on, while the others waited. It was killed. {further}"
        )
    # The first that has saved and ended has torchrun end the others, which then may die of that.
    said_so = ended.report is not None and ended.report.kind == RunInterruptedError.__name__
    if ended.exit_code == EXIT_CODE or said_so:
        return RunInterruptedError(f"SIGTERM: the training saved and stopped. {further}")
    if ended.report is not None:
        kind = getattr(errors, ended.report.kind, None)
        if isinstance(kind, type) and issubclass(kind, PPOError):
            return kind(ended.report.message)
        return ProcessError(f"{ended.report.traceback}{who} of the training said so. {further}")
    if ended.exit_code < 0:
        name = signal.Signals(-ended.exit_code).name
        return ProcessError(f"{who} of the training was ended by {name}{_likely(name)}. {further}")
    return ProcessError(
        f"{who} of the training ended with code {ended.exit_code} and no word; what it printed is "
        f"above. {further}"
    )


def _likely(name: str) -> str:
    match name:
        case "SIGKILL":
            return ": somebody's kill -9, or the machine ran out of memory (`dmesg` would say so)"
        case "SIGTERM":
            return " before it could save"
        case "SIGSEGV" | "SIGBUS" | "SIGILL" | "SIGFPE" | "SIGABRT":
            return ": it crashed in a library's native code; what it printed is above"
    return ""
