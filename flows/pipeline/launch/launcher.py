"""Starts the processes of a training, follows them, and says why they ended."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from pipeline.launch.commands import (
    ONE_MACHINE,
    THIS_MACHINE,
    Machines,
    command,
    environment_of,
    gpus,
)
from pipeline.launch.failure import as_error, ended_alone, first_ended
from pipeline.launch.process_tree import (
    FrozenProcesses,
    end_tree,
    rank_of,
    take_over,
    terminate,
    tree,
)
from ppo_core.distributed.processes import PARENT, end_with_parent
from ppo_core.errors import ProcessError
from ppo_core.reporting.metrics_file import METRICS_FILE

METRICS_POLL_SECONDS = 0.2
"""Seconds between two looks at the metrics."""

LOOK_SECONDS = 1.0
"""Seconds between two looks for processes that are stopped."""

OnMetrics = Callable[[int, Mapping[str, float]], None]


def train(
    job: Path,
    *,
    processes: int,
    machines: Machines = ONE_MACHINE,
    on_metrics: OnMetrics = lambda update, metrics: None,
) -> None:
    """Run `python -m ppo_core JOB` in so many processes on this machine, until they have ended.

    They go on from the last checkpoint of the job, if there is one. SIGTERM to this process is
    passed on to them; they save and end.

    Args:
        job: the settings; what is written by the way goes beside them.
        processes: how many; 0 takes one for each GPU, and one where there is none.
        machines: where the others run.
        on_metrics: called with the number of an update and its metrics, for every update that is
            in the file of metrics.

    Raises:
        RunInterruptedError: SIGTERM came, and a checkpoint was saved.
        ProcessError: a process died, failed for a reason of its own, or froze.
        PPOError: what a process raised on purpose; trying again would not mend it.
    """
    if machines.index > 0 and machines.main_address == THIS_MACHINE:
        # Metaflow starts the tasks of the other "machines" from the first one's, and leaves them.
        if _orphaned():
            raise ProcessError("The task of the first machine ended before this one began.")
        os.environ[PARENT] = str(os.getppid())
        end_with_parent()
    folder = job.parent
    take_over(folder / f"launcher-{machines.index}.json")
    processes = processes or gpus() or 1
    reason = folder / f"failure-{machines.index}.json"
    reason.unlink(missing_ok=True)
    with _passed_on() as told_to_stop:
        child = subprocess.Popen(
            command(job, processes, machines), env=environment_of(processes, machines, reason)
        )
        try:
            frozen = _follow(child, told_to_stop, _Follower(folder / METRICS_FILE, on_metrics))
        finally:
            end_tree(child.pid)
            code = child.wait()
    if code != 0:
        several = processes * machines.count > 1
        ended = (first_ended if several else ended_alone)(child.pid, code, reason)
        raise as_error(ended, frozen, folder)


def _orphaned() -> bool:
    """Whether the process that started this one has ended.

    Its place is taken by process 1, or by the service of a user's processes in its own session.
    """
    parent = os.getppid()
    return parent == 1 or os.getsid(parent) != os.getsid(0)


def _follow(
    child: subprocess.Popen[bytes], told_to_stop: threading.Event, follower: "_Follower"
) -> list[str]:
    """Watch a child until it ends; returns what was found frozen, in words, and killed."""
    watch, next_look, passed_on = FrozenProcesses(child.pid), 0.0, False
    frozen: list[str] = []
    while True:
        ended = child.poll() is not None
        follower.look()
        if ended:
            return frozen
        if told_to_stop.is_set() and not passed_on:
            passed_on = _tell_to_stop(child.pid)
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + LOOK_SECONDS
            for process in watch.look():
                frozen.append(_name(process))
                process.kill()
        time.sleep(METRICS_POLL_SECONDS)


def _name(process: psutil.Process) -> str:
    rank = rank_of(process)
    return f"Process {rank} (pid {process.pid})" if rank else f"A process (pid {process.pid})"


def _tell_to_stop(pid: int) -> bool:
    """SIGTERM for those that train; not for torchrun, which would kill them after 30 seconds."""
    below = [each for each in tree(pid)[1:] if rank_of(each) is not None]
    terminate(below or tree(pid)[:1])
    return True


class _Follower:
    """Reads a file of metrics while it grows."""

    def __init__(self, path: Path, on_metrics: OnMetrics) -> None:
        self._path = path
        self._on_metrics = on_metrics
        self._inode = self._position = 0

    def look(self) -> None:
        """Hand on the lines that have come since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                # Cut back: another file, from its beginning.
                self._inode, self._position = inode, 0
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                metrics: dict[str, Any] = json.loads(line)
                self._on_metrics(metrics.pop("update"), metrics)


@contextmanager
def _passed_on() -> Iterator[threading.Event]:
    """Inside, SIGTERM does not end this process but sets the event."""
    told = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        told.set()

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)
