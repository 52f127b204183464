"""Which process ended a training, and the error that says why."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path

from ppo_core import errors
from ppo_core.distributed.interruption import EXIT_CODE
from ppo_core.distributed.process import ErrorReport, read_report
from ppo_core.errors import PPOError, ProcessError, RunInterruptedError


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The process that ended a training, and how."""

    rank: int
    """Rank of the process; -1 for torchrun itself."""

    pid: int
    """Process id on its machine."""

    exit_code: int
    """Exit code; negative for a signal."""

    report: ErrorReport | None
    """The report that the process wrote, if any."""


def ended_alone(pid: int, code: int, reason: Path) -> Ended:
    """Return how the only process of a training ended; it may have written `reason`."""
    return Ended(rank=0, pid=pid, exit_code=code, report=read_report(reason))


def first_ended(pid: int, code: int, reason: Path) -> Ended:
    """Return which of several processes ended first, by the file `reason` that torchrun writes.

    Without that file it was torchrun itself, the process `pid`.
    """
    if not reason.is_file():
        return Ended(rank=-1, pid=pid, exit_code=code, report=None)
    fields = json.loads(reason.read_text(encoding="utf-8"))
    report = fields.pop("report")
    return Ended(**fields, report=report and ErrorReport(**report))


def as_error(ended: Ended, frozen: list[str], folder: Path) -> PPOError:
    """Return the error that ended a training.

    Args:
        ended: the process that ended it.
        frozen: names of the frozen processes that were killed.
        folder: folder of the checkpoints.
    """
    who = f"Process {ended.rank} (pid {ended.pid})" if ended.rank >= 0 else "torchrun"
    further = f"A further attempt resumes from the last checkpoint in {folder}."
    if frozen:
        return ProcessError(
            f"{frozen[0]} of the training was frozen: something stopped it (SIGSTOP) and did not "
            f"resume it, while the others waited. It was killed. {further}"
        )
    # When the first process has saved and ended, torchrun ends the others, which may then fail.
    was_interrupted = ended.report is not None and ended.report.kind == RunInterruptedError.__name__
    if ended.exit_code == EXIT_CODE or was_interrupted:
        return RunInterruptedError(f"SIGTERM: the training saved and stopped. {further}")
    if ended.report is not None:
        kind = getattr(errors, ended.report.kind, None)
        if isinstance(kind, type) and issubclass(kind, PPOError):
            return kind(ended.report.message)
        return ProcessError(f"{ended.report.traceback}{who} of the training raised this. {further}")
    if ended.exit_code < 0:
        name = signal.Signals(-ended.exit_code).name
        return ProcessError(f"{who} of the training was ended by {name}{_likely(name)}. {further}")
    return ProcessError(
        f"{who} of the training ended with code {ended.exit_code} and no report; its output is "
        f"above. {further}"
    )


def _likely(name: str) -> str:
    match name:
        case "SIGKILL":
            return ": somebody's kill -9, or the machine ran out of memory (`dmesg` would say so)"
        case "SIGTERM":
            return " before it could save"
        case "SIGSEGV" | "SIGBUS" | "SIGILL" | "SIGFPE" | "SIGABRT":
            return ": it crashed in a library's native code; its output is above"
    return ""
