"""Find stopped processes below this one, and end leftover ones of an earlier attempt."""

import json
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

FROZEN_LOOKS = 20
"""Consecutive checks, one per second, that find a process stopped before it counts as frozen."""

TIME_TO_SAVE = 60.0
"""Seconds that the processes of an earlier attempt have to save a checkpoint."""

SAME_START = 1.0
"""Seconds by which the start time of a process may differ when the clock is set."""


class FrozenProcesses:
    """Finds processes below `root` that were stopped (SIGSTOP) and not resumed."""

    def __init__(self, root: int) -> None:
        """Watch the process `root` and all below it."""
        self._root = root
        # Counts checks, not seconds: if this process is stopped as well, no check passes.
        self._looks: Counter[psutil.Process] = Counter()

    def look(self) -> list[psutil.Process]:
        """Return the processes that were stopped at each of the last FROZEN_LOOKS calls."""
        stopped = [each for each in tree(self._root) if _is_stopped(each)]
        self._looks = Counter({each: self._looks[each] + 1 for each in stopped})
        return [each for each in stopped if self._looks[each] >= FROZEN_LOOKS]


def tree(root: int) -> list[psutil.Process]:
    """Return a process and all below it; empty if it has ended."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_tree(root: int) -> None:
    """Kill a process and all below it, and wait until they have ended."""
    processes = tree(root)
    for process in processes:
        _signal(process, kill=True)
    psutil.wait_procs(processes, timeout=TIME_TO_SAVE)


def take_over(record: Path) -> None:
    """End the processes that an earlier attempt left on this machine, and record this attempt.

    If the scheduler of a flow is killed, its task may continue to train. It gets SIGTERM, saves a
    checkpoint and ends; if it does not end, it is killed.

    Args:
        record: file of the last attempt; one per machine.
    """
    for process in _still_running(record):
        print(
            f"Ending an earlier attempt that is still running (process {process.pid}).", flush=True
        )
        below = tree(process.pid)
        _signal(process, kill=False)
        psutil.wait_procs([process], timeout=TIME_TO_SAVE)
        # Its children end with it, except stopped ones.
        for each in below:
            _signal(each, kill=True)
        psutil.wait_procs(below, timeout=TIME_TO_SAVE)
    me = psutil.Process()
    record.write_text(
        json.dumps({"host": socket.gethostname(), "pid": me.pid, "started": me.create_time()}),
        encoding="utf-8",
    )


def rank_of(process: psutil.Process) -> str | None:
    """Return the rank that torchrun gave a process; None for another process."""
    try:
        return process.environ().get("RANK")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _still_running(record: Path) -> Iterator[psutil.Process]:
    if not record.is_file():
        return
    earlier = json.loads(record.read_text(encoding="utf-8"))
    if earlier["host"] != socket.gethostname() or earlier["pid"] == os.getpid():
        return
    try:
        process = psutil.Process(earlier["pid"])
        if abs(process.create_time() - earlier["started"]) < SAME_START:
            yield process
    except psutil.NoSuchProcess:
        return


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        if kill:
            process.kill()
        else:
            process.terminate()
    except psutil.NoSuchProcess:
        return


def terminate(processes: Iterable[psutil.Process]) -> None:
    """Send SIGTERM to processes, which may save before they end."""
    for process in processes:
        _signal(process, kill=False)
