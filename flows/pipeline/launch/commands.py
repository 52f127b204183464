"""The command and the environment that start the processes of a training on one machine."""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ppo_core
from ppo_core.distributed.process import ERROR_FILE, PARENT

PORTS = range(20_000, 30_000)
"""Ports for the rendezvous of several machines, below the ephemeral ports of the system."""

RENDEZVOUS_SECONDS = 600
"""Seconds that a machine may start later than the others, to pull an image or wait for a spot."""

THIS_MACHINE = "127.0.0.1"
"""Metaflow's address of the first machine if all tasks run on this machine."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of a training, seen from one of them."""

    count: int = 1
    """Number of machines."""

    index: int = 0
    """Index of this machine."""

    main_address: str = THIS_MACHINE
    """Address of the first machine; THIS_MACHINE if all of them are this machine."""

    attempt: str = ""
    """Text that all machines of an attempt share and no other attempt has, which separates the
    rendezvous of leftover machines."""


ONE_MACHINE = Machines()
"""All processes run on this machine."""


def command(job: Path, processes: int, machines: Machines) -> list[str]:
    """Return the command that starts the processes of this machine."""
    if processes * machines.count == 1:
        return [sys.executable, "-m", "ppo_core", str(job)]
    rendezvous = ["--standalone"]
    if machines.count > 1:
        # All machines compute the same id and port. Each attempt has another port, because a port
        # may be taken, and another id, which keeps out machines of earlier attempts.
        rendezvous_id = hashlib.sha256(f"{job.parent} {machines.attempt}".encode()).hexdigest()[:16]
        port = PORTS[int(rendezvous_id, 16) % len(PORTS)]
        timeouts = f"join_timeout={RENDEZVOUS_SECONDS},read_timeout={RENDEZVOUS_SECONDS}"
        rendezvous = [
            f"--nnodes={machines.count}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={machines.main_address}:{port}",
            f"--rdzv-id={rendezvous_id}",
            f"--rdzv-conf=is_host={machines.index == 0},{timeouts}",
        ]
    return [
        *(
            sys.executable,
            "-m",
            "ppo_core.distributed.torchrun",
            *rendezvous,
            f"--nproc-per-node={processes}",
        ),
        *("-m", "ppo_core", str(job)),
    ]


def gpus() -> int:
    """Return the number of GPUs that torch finds on this machine."""
    devices = Path("/dev")
    if not (any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()):
        return 0
    # In a process of its own: importing torch is slow and takes much memory.
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
        # More spinning threads than cores are many times slower.
        share = max(len(os.sched_getaffinity(0)) // here, 1)
        threads = min(int(os.environ.get("OMP_NUM_THREADS", share)), share)
        environment |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return environment
