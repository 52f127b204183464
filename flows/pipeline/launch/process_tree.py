"""Find stopped child processes, and end processes left over from an earlier attempt."""

import json
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ppo_core.io.atomic_files import explained_writes, write_atomically
from ppo_core.io.text_files import parse_json
from ppo_core.io.validation import Finite, Natural, read_record

FROZEN_LOOKS = 20
"""Number of consecutive checks, one per second, after which a stopped process counts as frozen."""

TIME_TO_SAVE = 60.0
"""Maximum time in seconds for the processes of an earlier attempt to save a checkpoint."""

SAME_START = 1.0
"""Tolerance in seconds for the start time of a process; setting the clock changes this time."""


class FrozenProcesses:
    """Finds descendants of the process `root` that were stopped (SIGSTOP) and not resumed."""

    def __init__(self, root: int) -> None:
        """Watch the process `root` and all its descendants."""
        self._root = root
        # Count checks, not seconds: while this process itself is stopped, the count must not grow.
        self._looks: Counter[psutil.Process] = Counter()

    def look(self) -> list[psutil.Process]:
        """Return the processes that were stopped in each of the last FROZEN_LOOKS calls."""
        stopped = [each for each in tree(self._root) if _is_stopped(each)]
        self._looks = Counter({each: self._looks[each] + 1 for each in stopped})
        return [each for each in stopped if self._looks[each] >= FROZEN_LOOKS]


def tree(root: int) -> list[psutil.Process]:
    """Return a process and all its descendants; empty if the process has ended."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_tree(root: int) -> None:
    """Kill a process and all its descendants, and wait until they have ended."""
    processes = tree(root)
    kill(processes)
    psutil.wait_procs(processes, timeout=TIME_TO_SAVE)


def take_over(record: Path) -> None:
    """End the processes that an earlier attempt left on this machine, and record this attempt.

    If the process that schedules a flow is killed, a task may continue to train. This function
    sends SIGTERM to the task, so that it saves a checkpoint, and kills the task if it does not end
    within TIME_TO_SAVE seconds.

    Args:
        record: file with the identity of the last attempt's process on this machine.
    """
    for process in _still_running(record):
        print(
            f"Warning: Ending an earlier attempt that is still running (process {process.pid}).",
            flush=True,
        )
        below = tree(process.pid)
        terminate([process])
        psutil.wait_procs([process], timeout=TIME_TO_SAVE)
        # The children end with their parent, unless they are stopped (SIGSTOP).
        kill(below)
        psutil.wait_procs(below, timeout=TIME_TO_SAVE)
    with explained_writes(record):
        write_atomically(record, json.dumps(asdict(ProcessIdentity.of(psutil.Process()))))


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process. A later process with the same process id has another identity."""

    host: str
    pid: Natural
    started: Finite
    """Start time in seconds since 1970."""

    @classmethod
    def of(cls, process: psutil.Process) -> "ProcessIdentity":
        """Return the identity of a process on this machine."""
        return cls(socket.gethostname(), process.pid, process.create_time())

    @property
    def is_local(self) -> bool:
        """Whether the process runs or ran on this machine."""
        return self.host == socket.gethostname()


def find_process(identity: ProcessIdentity) -> psutil.Process | None:
    """Return the process with an identity; None if it has ended or is on another machine."""
    if not identity.is_local:
        return None
    try:
        process = psutil.Process(identity.pid)
        is_same = abs(process.create_time() - identity.started) < SAME_START
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def rank_of(process: psutil.Process) -> str | None:
    """Return the rank that torchrun gave a process; None if the process has no rank."""
    try:
        return process.environ().get("RANK")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _still_running(record: Path) -> Iterator[psutil.Process]:
    if not record.is_file():
        return
    try:
        process = find_process(read_record(parse_json(record.read_bytes()), ProcessIdentity))
    except ValueError as error:
        print(
            f"Warning: '{record}' is damaged, so no earlier attempt is ended: {error}.", flush=True
        )
        return
    if process is not None and process.pid != os.getpid():
        yield process


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes; ignore processes that have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def terminate(processes: Iterable[psutil.Process]) -> None:
    """Send SIGTERM to processes, which may save a checkpoint before they end."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
