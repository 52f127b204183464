"""torchrun for a launcher: `python -m ppo_core.distributed.torchrun ...` takes what torchrun takes.

It ends with the process that started it, as the processes that it starts end with it, and it says
which of them failed first in the file that the variable TORCHELASTIC_ERROR_FILE names.
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

from ppo_core.distributed.processes import (
    ERROR_FILE,
    PARENT,
    ErrorReport,
    end_with_parent,
    read_report,
)

NOTICED_AFTER = 2.0
"""Seconds in which the death of a process has been noticed; errors of the others come sooner."""

_CONSEQUENCES = {-signal.SIGTERM, -signal.SIGABRT}
"""How processes end because another one has: told to by torchrun, or in gloo's threads."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The process that failed first."""

    rank: int
    """Its number among all processes."""

    pid: int
    """Its id on its machine."""

    exit_code: int
    """What it ended with; below 0 a signal."""

    report: ErrorReport | None
    """What it said itself, if it could."""


def main(argv: Sequence[str]) -> int:
    """Run the processes; returns 0, or 1 where one of them failed."""
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
    """The failure that the others follow from.

    A process that is killed takes its connections with it. The others may have reported that before
    its death is noticed, so a signal counts as `NOTICED_AFTER` seconds earlier, unless it is one
    that itself follows from the end of another process. What torchrun ended counts a second later:
    torch cuts the time off to whole seconds, which would place it before the report of the reason.

    Args:
        failures: each with its time: of the report, or the second when the end was noticed.
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
