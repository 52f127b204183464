"""The processes below this one: stopped ones are found, left-over ones ended."""

import json
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

FROZEN_LOOKS = 20
"""Looks, one a second, at which a process was found stopped before it counts as frozen."""

TIME_TO_SAVE = 60.0
"""Seconds in which the processes of an earlier attempt may save what they have."""

SAME_START = 1.0
"""Seconds by which the start of one process is told differently while clocks are set."""


class FrozenProcesses:
    """Finds processes below `root` that were stopped (SIGSTOP) and are not let go on."""

    def __init__(self, root: int) -> None:
        """Watch the process `root` and those that it started."""
        self._root = root
        # Looks and not seconds: where all of us are stopped and go on, no time has passed.
        self._looks: Counter[psutil.Process] = Counter()

    def look(self) -> list[psutil.Process]:
        """Those that were stopped at each of the last FROZEN_LOOKS looks."""
        stopped = [each for each in tree(self._root) if _is_stopped(each)]
        self._looks = Counter({each: self._looks[each] + 1 for each in stopped})
        return [each for each in stopped if self._looks[each] >= FROZEN_LOOKS]


def tree(root: int) -> list[psutil.Process]:
    """A process and all below it; none where it has ended."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_tree(root: int) -> None:
    """Kill a process and all below it, and wait until they are gone."""
    processes = tree(root)
    for process in processes:
        _signal(process, kill=True)
    psutil.wait_procs(processes, timeout=TIME_TO_SAVE)


def take_over(record: Path) -> None:
    """End what an earlier attempt left running on this machine, and note that we are next.

    The scheduler of a flow may be killed and leave its task behind, which goes on training. It is
    told to stop, which saves what it has, and killed where it does not.

    Args:
        record: file of the attempts; there is one for each machine that works at a time.
    """
    for process in _still_running(record):
        print(f"Ending an earlier attempt that still runs (process {process.pid}).", flush=True)
        below = tree(process.pid)
        _signal(process, kill=False)
        psutil.wait_procs([process], timeout=TIME_TO_SAVE)
        # Its children end with it; the ones that were stopped need more.
        for each in below:
            _signal(each, kill=True)
        psutil.wait_procs(below, timeout=TIME_TO_SAVE)
    me = psutil.Process()
    record.write_text(
        json.dumps({"host": socket.gethostname(), "pid": me.pid, "started": me.create_time()}),
        encoding="utf-8",
    )


def rank_of(process: psutil.Process) -> str | None:
    """Number of a process among those of a training, as torchrun told it; None for others."""
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
    """Tell processes to stop; they may save first."""
    for process in processes:
        _signal(process, kill=False)
