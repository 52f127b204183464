"""The command and the environment that start the processes of a training on one machine."""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ppo_core
from ppo_core.distributed.processes import ERROR_FILE, PARENT

PORTS = range(20_000, 30_000)
"""Ports at which several machines can meet: below those that systems give away themselves."""

MEETING_SECONDS = 600
"""Seconds in which machines may come later than others, which pull an image or wait for a spot."""

THIS_MACHINE = "127.0.0.1"
"""Metaflow's address of the first of several machines where it runs their tasks here."""


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


ONE_MACHINE = Machines()
"""All processes run on this machine."""


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


def environment_of(processes: int, machines: Machines, reason: Path) -> dict[str, str]:
    """Return the environment of the processes, which write to `reason` why they failed."""
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
