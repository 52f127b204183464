"""torchrun for a launcher: `python -m ppo_core.distributed.torchrun` with torchrun's arguments.

It ends with the process that started it, and the processes that it starts end with it. It writes
which of them failed first to the file that the variable TORCHELASTIC_ERROR_FILE names.
"""

import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from ppo_core.distributed.process import (
    ERROR_FILE,
    PARENT,
    ErrorReport,
    end_with_parent,
    read_report,
)

NOTICED_AFTER = 2.0
"""Seconds until the death of a process is noticed; errors of the other processes come sooner."""

_CONSEQUENCES = {-signal.SIGTERM, -signal.SIGABRT}
"""Exit codes of processes that end because another one did: by torchrun, or in gloo's threads."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The process that failed first."""

    rank: int
    """Its rank."""

    pid: int
    """Its process id on its machine."""

    exit_code: int
    """Its exit code; a negative one is a signal."""

    report: ErrorReport | None
    """Its own report, if it could write one."""


def main(argv: Sequence[str]) -> int:
    """Run the processes; return 0, or 1 if one of them failed."""
    os.environ[PARENT] = str(os.getpid())
    try:
        run(parse_args(argv))
    except ChildFailedError as error:
        failures = [_failure(rank, each) for rank, each in error.failures.items()]
        if path := os.environ.get(ERROR_FILE):
            Path(path).write_text(json.dumps(asdict(first_failure(failures))), encoding="utf-8")
        return 1
    return 0


def first_failure(failures: Iterable[tuple[Failure, float]]) -> Failure:
    """Return the failure that caused the other ones: the earliest, by corrected times.

    The connections of a killed process break, and the other processes may report that before its
    death is noticed. So death by a signal counts `NOTICED_AFTER` seconds earlier, unless the
    signal itself follows from the end of another process. A process that torchrun ended counts a
    second later: torch truncates its time to full seconds, which could put it before the cause.

    Args:
        failures: failures with the time of the report, or the second when the end was noticed.
    """

    def moment(failure: Failure, time: float) -> float:
        if failure.report is not None or failure.exit_code >= 0:
            return time
        if failure.exit_code == -signal.SIGTERM:
            return time + 1.0
        return time if failure.exit_code in _CONSEQUENCES else time - NOTICED_AFTER

    return min(failures, key=lambda each: moment(*each))[0]


def _failure(rank: int, process: ProcessFailure) -> tuple[Failure, float]:
    report = read_report(Path(process.error_file))
    failure = Failure(rank=rank, pid=process.pid, exit_code=process.exitcode, report=report)
    return failure, report.time if report else process.timestamp


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
