"""Start and monitor the processes of a training, and raise if a process fails."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline.launch.commands import (
    ONE_MACHINE,
    PPO,
    THIS_MACHINE,
    Machines,
    command,
    environment_of,
    gpus,
)
from pipeline.launch.failure import as_error, ended_alone, first_ended
from pipeline.launch.forked_processes import ForkedProcess, start_python
from pipeline.launch.process_tree import (
    FrozenProcesses,
    end_tree,
    kill,
    rank_of,
    take_over,
    terminate,
)
from pipeline.launch.stall_watch import STALL_MINUTES, StallWatch
from pipeline.settings.environment import runs_remotely
from ppo_core.distributed.interruption import Interruption
from ppo_core.distributed.process import PARENT, end_with_parent, stacks_file
from ppo_core.errors import ProcessError
from ppo_core.io.progress_bar import PROGRESS_FILE
from ppo_core.reporting.metrics_file import METRICS_FILE, UPDATE, read_line

METRICS_POLL_SECONDS = 0.2
"""Seconds between two reads of the metrics file."""

STACK_SECONDS = 2.0
"""Seconds to wait for a process to write its stacks; writing takes milliseconds."""

LOOK_SECONDS = 1.0
"""Seconds between two checks for stopped processes."""

SPOT_NOTICE = Path("/tmp/spot_termination_notice")
"""File that Metaflow writes two minutes before AWS reclaims this spot instance. No signal is
sent."""

OnMetrics = Callable[[int, Mapping[str, float]], None]


def train(
    job: Path,
    *,
    processes: int,
    machines: Machines = ONE_MACHINE,
    program: Sequence[str] = PPO,
    stall_minutes: float = STALL_MINUTES,
    on_metrics: OnMetrics = lambda update, metrics: None,
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Run `python -m PROGRAM JOB` in one or several processes on this machine until they end.

    The processes resume from the last checkpoint of the job, if any. If this process receives
    SIGTERM, it forwards the signal to the training processes, which save a checkpoint and end. A
    notice that AWS will reclaim this spot instance has the same effect.

    Args:
        job: settings file of the job; all output is written to its folder.
        processes: number of processes; 0 for one process per GPU, or one process without a GPU.
        machines: the machines of the training.
        program: module that the processes run, and its arguments before the job; PPO by default.
        stall_minutes: time without progress after which the training is ended. If 20 times the
            median time between two lines of the metrics file is longer, this longer time applies.
            A new line and a change of PROGRESS_FILE are signs of progress.
        on_metrics: called with the number and the metrics of each line in the metrics file.
        on_wait: called several times a second; an error that it raises ends the processes.

    Raises:
        RunInterruptedError: SIGTERM or a notice of AWS arrived, and a checkpoint was saved.
        ProcessError: a process died, failed unexpectedly, was frozen, or made no progress.
        PPOError: a process failed with an error of the project; the same error is raised here.
    """
    if machines.index > 0 and machines.main_address == THIS_MACHINE:
        _end_with_first_task()
    folder = job.parent
    take_over(folder / f"launcher-{machines.index}.json")
    processes = processes or gpus() or 1
    reason = folder / f"failure-{machines.index}.json"
    reason.unlink(missing_ok=True)
    with Interruption() as interruption:
        child = start_python(
            command(job, processes, machines, program),
            environment_of(processes, machines, reason),
        )
        try:
            frozen = _follow(
                child,
                interruption,
                _MetricsFollower(folder / METRICS_FILE, on_metrics),
                StallWatch(stall_minutes),
                folder,
                on_wait,
            )
        finally:
            code = _end(child)
    if code != 0:
        several = processes * machines.count > 1
        ended = (first_ended if several else ended_alone)(child.pid, code, reason)
        raise as_error(ended, frozen, folder)


def _end(child: subprocess.Popen[bytes] | ForkedProcess) -> int:
    """Kill a child with its descendants if it still runs; return its exit code."""
    # Another process may have the number of a child that has ended.
    if child.poll() is None:
        end_tree(child.pid)
    return child.wait()


def _end_with_first_task() -> None:
    """Make this task end with the first task, which starts the other tasks but never ends them.

    Raises:
        ProcessError: the first task has already ended.
    """
    if _orphaned():
        raise ProcessError("The task of the first machine ended before this task began.")
    os.environ[PARENT] = str(os.getppid())
    end_with_parent()


def _orphaned() -> bool:
    """Return whether the process that started this process has ended.

    The parent is then process 1, or the user's service manager, which is in another session.
    """
    parent = os.getppid()
    return parent == 1 or os.getsid(parent) != os.getsid(0)


def _follow(
    child: subprocess.Popen[bytes] | ForkedProcess,
    interruption: Interruption,
    follower: "_MetricsFollower",
    stall: StallWatch,
    folder: Path,
    on_wait: Callable[[], None],
) -> list[str]:
    """Monitor a child until it ends; kill frozen processes and return their names.

    Raises:
        ProcessError: the processes make no progress.
    """
    progress = _ChangedFile(folder / PROGRESS_FILE)
    watch, next_look, forwarded = FrozenProcesses(_root(child)), 0.0, False
    frozen: list[str] = []
    while True:
        ended = child.poll() is not None
        has_lines, has_moved = follower.read_new_lines() > 0, progress.has_changed()
        if has_lines:
            stall.advance()
        elif has_moved:
            stall.stay_alive()
        if ended:
            return frozen
        if stall.has_stalled():
            raise _stalled(child.pid, stall, folder)
        if (interruption.requested or _has_spot_notice()) and not forwarded:
            # Do not signal torchrun, which would kill the training processes after 30 seconds.
            terminate(_training_processes(child.pid))
            forwarded = True
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + LOOK_SECONDS
            stopped = watch.look()
            frozen += map(_name, stopped)
            kill(stopped)
        on_wait()
        time.sleep(METRICS_POLL_SECONDS)


def _root(child: subprocess.Popen[bytes] | ForkedProcess) -> int:
    """Return the process that, with its descendants, must not freeze while the child runs.

    A frozen fork server could not report the end of the child.
    """
    if isinstance(child, ForkedProcess):
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(child.pid).ppid()
    return child.pid


def _has_spot_notice() -> bool:
    """Return whether AWS has announced that it will take this machine."""
    return runs_remotely() and SPOT_NOTICE.exists()


def _stalled(pid: int, stall: StallWatch, folder: Path) -> ProcessError:
    """Make the processes write their stacks, and return the error to raise."""
    files = []
    for process in _training_processes(pid):
        with suppress(psutil.NoSuchProcess):
            files.append(str(stacks_file(folder, rank_of(process) or "0")))
            process.send_signal(signal.SIGUSR1)
    time.sleep(STACK_SECONDS)
    return ProcessError(
        f"The training made no progress for {stall.limit() / 60:.3g} minutes, so the flow ended "
        f"it. What its processes were doing is in {', '.join(files)}. If this is not an error, "
        f"raise stall_minutes. A further attempt resumes from the last checkpoint in {folder}, if "
        "there is one."
    )


def _name(process: psutil.Process) -> str:
    rank = rank_of(process)
    return f"Process {rank} (pid {process.pid})" if rank else f"A process (pid {process.pid})"


def _training_processes(pid: int) -> list[psutil.Process]:
    """Return the processes that torchrun started, or the only process of the training."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        # The processes that a reward function starts inherit RANK, but are no children of torchrun.
        return [each for each in process.children() if rank_of(each) is not None] or [process]
    return []


class _ChangedFile:
    """Detects whether a file was written since the last check."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._time()

    def has_changed(self) -> bool:
        before, self._seen = self._seen, self._time()
        return self._seen != before

    def _time(self) -> int:
        return self._path.stat().st_mtime_ns if self._path.exists() else 0


class _MetricsFollower:
    """Reads a metrics file while a training appends to it."""

    def __init__(self, path: Path, on_metrics: OnMetrics) -> None:
        self._path = path
        self._on_metrics = on_metrics
        self._inode = self._position = 0

    def read_new_lines(self) -> int:
        """Call `on_metrics` for each line added since the last call; return the number of lines."""
        count = 0
        if not self._path.exists():
            return count
        with self._path.open("rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                # A resumed training has replaced the file, so it is read from the beginning.
                self._inode, self._position = inode, 0
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                # Skip a damaged line: a resumed training repairs it and replaces the file.
                if (metrics := read_line(line)) is not None:
                    self._on_metrics(metrics.pop(UPDATE), metrics)
                    count += 1
        return count
