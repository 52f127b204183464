"""Run torchrun for a launcher: `python -m ppo_core.distributed.torchrun TORCHRUN_ARGUMENTS`.

This process ends when its parent process ends, and each process that torchrun starts ends when this
process ends. If a process that torchrun started fails, a report of the first failure is written to
the file that the variable TORCHELASTIC_ERROR_FILE names.
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
from ppo_core.errors.redacted_output import install_redaction

NOTICED_AFTER = 2.0
"""Upper estimate, in seconds, of the delay until torchrun notices that a process was killed."""

_CONSEQUENCES = {-signal.SIGTERM, -signal.SIGABRT}
"""Exit codes of processes that torchrun or gloo ended because another process had ended."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The process that failed first."""

    rank: int
    """Rank of the process."""

    pid: int
    """Process id on the machine of the process."""

    exit_code: int
    """Exit code of the process; a negative code is a signal number."""

    report: ErrorReport | None
    """Error report of the process; None if the process wrote no report."""


def main(argv: Sequence[str]) -> int:
    """Run the processes; return 0, or 1 if a process failed."""
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
    """Return the failure that probably caused the others: the earliest by corrected time.

    When a process is killed, the other processes may report broken connections before torchrun
    notices the killed process. So `NOTICED_AFTER` seconds are subtracted from the time of a failure
    by signal, unless another process caused the signal. One second is added to the time of a
    process that torchrun ended: torch truncates times to full seconds, so this process could seem
    to fail before the process that failed first.

    Args:
        failures: each failure with its time: the time of its report, or, if there is no report,
            the time when torchrun noticed the failure.
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
    install_redaction()
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
