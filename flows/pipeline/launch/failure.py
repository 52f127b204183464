"""Find the process whose failure ended a training, and build the error to raise."""

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
    """The process whose failure ended the training, with its exit code and error report."""

    rank: int
    """Rank of the process; -1 for torchrun itself."""

    pid: int
    """Process id."""

    exit_code: int
    """Exit code; for a signal, the negative signal number."""

    report: ErrorReport | None
    """Error report that the process wrote; None if there is none."""


def ended_alone(pid: int, code: int, reason: Path) -> Ended:
    """Return the record of a training's only process, with the report in `reason`, if any."""
    return Ended(rank=0, pid=pid, exit_code=code, report=read_report(reason))


def first_ended(pid: int, code: int, reason: Path) -> Ended:
    """Return the process that failed first, according to the file `reason` that torchrun writes.

    If `reason` does not exist, torchrun itself (process `pid`) ended first.
    """
    if not reason.is_file():
        return Ended(rank=-1, pid=pid, exit_code=code, report=None)
    fields = json.loads(reason.read_text(encoding="utf-8"))
    report = fields.pop("report")
    return Ended(**fields, report=report and ErrorReport(**report))


def as_error(ended: Ended, frozen: list[str], folder: Path) -> PPOError:
    """Return the error that ended a training.

    Args:
        ended: the process that ended the training.
        frozen: names of the processes that were killed because they were frozen.
        folder: folder of the checkpoints.
    """
    who = f"Process {ended.rank} (pid {ended.pid})" if ended.rank >= 0 else "torchrun"
    further = f"A further attempt resumes from the last checkpoint in {folder}, if there is one."
    if frozen:
        return ProcessError(
            f"{frozen[0]} of the training was frozen (SIGSTOP) and not resumed, while the other "
            f"processes waited, so the flow killed the process. {further}"
        )
    # The exit code is not enough: after the first process has saved and ended, torchrun ends the
    # other processes, so a process that has reported the interruption may end by a signal.
    was_interrupted = ended.report is not None and ended.report.kind == RunInterruptedError.__name__
    if ended.exit_code == EXIT_CODE or was_interrupted:
        return RunInterruptedError(
            f"The training stopped after SIGTERM or after a notice of AWS. {further}"
        )
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
            return ": by `kill -9`, or because the machine ran out of memory (see `dmesg`)"
        case "SIGTERM":
            return " before it could save"
        case "SIGSEGV" | "SIGBUS" | "SIGILL" | "SIGFPE" | "SIGABRT":
            return ": the native code of a library crashed; the output is above"
    return ""
