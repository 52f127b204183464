"""Starts the processes of a training, follows them, and says why they ended."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import ppo_core
from pipeline.launch.process_tree import (
    FrozenProcesses,
    end_tree,
    rank_of,
    take_over,
    terminate,
    tree,
)
from ppo_core import errors
from ppo_core.distributed.interruption import EXIT_CODE, Interruption
from ppo_core.distributed.process import (
    ERROR_FILE,
    PARENT,
    ErrorReport,
    end_with_parent,
    read_report,
)
from ppo_core.errors import PPOError, ProcessError, RunInterruptedError
from ppo_core.reporting.metrics_file import METRICS_FILE

POLL_SECONDS = 0.2
"""Seconds between two looks at the metrics."""

LOOK_SECONDS = 1.0
"""Seconds between two looks for processes that are stopped."""

PORTS = range(20_000, 30_000)
"""Ports at which several machines can meet: below those that systems give away themselves."""

MEETING_SECONDS = 600
"""Seconds in which machines may come later than others, which pull an image or wait for a spot."""

THIS_MACHINE = "127.0.0.1"
"""Metaflow's address of the first of several machines where it runs their tasks here."""

OnMetrics = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of a training, as one of them sees it."""

    count: int = 1
    """How many there are."""

    index: int = 0
    """Which of them this is."""

    main_address: str = THIS_MACHINE
    """Where the first is found; THIS_MACHINE where they all are this machine."""

    attempt: str = ""
    """What all of them know and no earlier attempt did: one that was left over meets nobody."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The process that ended a training."""

    rank: int
    """Its number among all; -1 for torchrun itself."""

    pid: int
    """Its id on its machine."""

    exit_code: int
    """What it ended with; below 0 a signal."""

    report: ErrorReport | None
    """What it said itself, if it could."""


def train(
    job: Path,
    *,
    processes: int,
    machines: Machines = Machines(),
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
    interruption = Interruption()
    with interruption:
        child = subprocess.Popen(
            command(job, processes, machines), env=_environment(processes, machines, reason)
        )
        try:
            frozen = _follow(child, interruption, _Follower(folder / METRICS_FILE, on_metrics))
        finally:
            end_tree(child.pid)
            code = child.wait()
    if code != 0:
        several = processes * machines.count > 1
        ended = (_first_of_several if several else _alone)(child.pid, code, reason)
        raise as_error(ended, frozen, folder)


def command(job: Path, processes: int, machines: Machines) -> list[str]:
    """What starts the processes of this machine."""
    if processes * machines.count == 1:
        return [sys.executable, "-m", "ppo_core", str(job)]
    meeting = ["--standalone"]
    if machines.count > 1:
        # Known to all machines without a word between them. Each attempt has another port, as one
        # of them may be taken, and no machine of an earlier attempt is let in.
        meeting_id = hashlib.sha256(f"{job.parent} {machines.attempt}".encode()).hexdigest()[:16]
        port = PORTS[int(meeting_id, 16) % len(PORTS)]
        waiting = f"join_timeout={MEETING_SECONDS},read_timeout={MEETING_SECONDS}"
        meeting = [
            f"--nnodes={machines.count}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={machines.main_address}:{port}",
            f"--rdzv-id={meeting_id}",
            f"--rdzv-conf=is_host={machines.index == 0},{waiting}",
        ]
    return [
        *(
            sys.executable,
            "-m",
            "ppo_core.distributed.torchrun",
            *meeting,
            f"--nproc-per-node={processes}",
        ),
        *("-m", "ppo_core", str(job)),
    ]


def gpus() -> int:
    """How many GPUs torch would use here."""
    devices = Path("/dev")
    if not (any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()):
        return 0
    # In a process of its own: torch takes seconds and much memory.
    count = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.check_output([sys.executable, "-c", count], text=True))


def _orphaned() -> bool:
    """Whether the process that started this one has ended.

    Its place is taken by process 1, or by the service of a user's processes in its own session.
    """
    parent = os.getppid()
    return parent == 1 or os.getsid(parent) != os.getsid(0)


def _environment(processes: int, machines: Machines, reason: Path) -> dict[str, str]:
    root = str(Path(ppo_core.__file__).parent.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
        PARENT: str(os.getpid()),
        ERROR_FILE: str(reason),
    }
    here = processes * (machines.count if machines.main_address == THIS_MACHINE else 1)
    if here > 1:
        # More threads than cores, each waiting in a loop, are ten times slower.
        share = max(len(os.sched_getaffinity(0)) // here, 1)
        threads = min(int(os.environ.get("OMP_NUM_THREADS", share)), share)
        environment |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return environment


def _follow(
    child: subprocess.Popen[bytes], interruption: Interruption, follower: "_Follower"
) -> list[str]:
    """Watch a child until it ends; returns what was found frozen, in words, and killed."""
    watch, frozen, next_look, passed_on = FrozenProcesses(child.pid), [], 0.0, False
    while True:
        ended = child.poll() is not None
        follower.look()
        if ended:
            return frozen
        if interruption.requested and not passed_on:
            passed_on = _tell_to_stop(child.pid)
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + LOOK_SECONDS
            for process in watch.look():
                frozen.append(_name(process))
                process.kill()
        time.sleep(POLL_SECONDS)


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


def _alone(pid: int, code: int, reason: Path) -> Ended:
    return Ended(rank=0, pid=pid, exit_code=code, report=read_report(reason))


def _first_of_several(pid: int, code: int, reason: Path) -> Ended:
    if not reason.is_file():
        return Ended(rank=-1, pid=pid, exit_code=code, report=None)
    said = json.loads(reason.read_text(encoding="utf-8"))
    report = said.pop("report")
    return Ended(**said, report=report and ErrorReport(**report))


def as_error(ended: Ended, frozen: list[str], folder: Path) -> PPOError:
    """What ended a training, whose checkpoints are in `folder`; `frozen` names what was killed."""
    who = f"Process {ended.rank} (pid {ended.pid})" if ended.rank >= 0 else "torchrun"
    further = f"A further attempt goes on from the last checkpoint in {folder}."
    if frozen:
        return ProcessError(
            f"{frozen[0]} of the training was frozen: something stopped it (SIGSTOP) and did not "
            f"let it go on, while the others waited. It was killed. {further}"
        )
    # The first that has saved and ended has torchrun end the others, which then may die of that.
    said_so = ended.report is not None and ended.report.kind == RunInterruptedError.__name__
    if ended.exit_code == EXIT_CODE or said_so:
        return RunInterruptedError(f"SIGTERM: the training saved and stopped. {further}")
    if ended.report is not None:
        kind = getattr(errors, ended.report.kind, None)
        if isinstance(kind, type) and issubclass(kind, PPOError):
            return kind(ended.report.message)
        return ProcessError(f"{ended.report.traceback}{who} of the training said so. {further}")
    if ended.exit_code < 0:
        name = signal.Signals(-ended.exit_code).name
        return ProcessError(f"{who} of the training was ended by {name}{_likely(name)}. {further}")
    return ProcessError(
        f"{who} of the training ended with code {ended.exit_code} and no word; what it printed is "
        f"above. {further}"
    )


def _likely(name: str) -> str:
    match name:
        case "SIGKILL":
            return ": somebody's kill -9, or the machine ran out of memory (`dmesg` would say so)"
        case "SIGTERM":
            return " before it could save"
        case "SIGSEGV" | "SIGBUS" | "SIGILL" | "SIGFPE" | "SIGABRT":
            return ": it crashed in a library's native code; what it printed is above"
    return ""
