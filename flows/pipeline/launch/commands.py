"""The command and the environment that start the processes of a training on one machine."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ppo_core
from ppo_core.distributed.process import ERROR_FILE, PARENT, STACKS

PORTS = range(20_000, 30_000)
"""Ports for the rendezvous of several machines; they are below the system's ephemeral ports."""

RENDEZVOUS_SECONDS = 600
"""Timeout in seconds for machines that start late, for example because they pull an image."""

THIS_MACHINE = "127.0.0.1"
"""Address that Metaflow gives the first machine if all tasks run on the local machine."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of a training, and the index of the current machine."""

    count: int = 1
    """Number of machines."""

    index: int = 0
    """Index of the current machine, from 0."""

    main_address: str = THIS_MACHINE
    """Address of the first machine; THIS_MACHINE if all tasks run on the local machine."""

    attempt: str = ""
    """Text that is equal on all machines and differs between attempts. It keeps machines of an
    earlier attempt out of the rendezvous."""


PPO = ("ppo_core",)
"""Words of the command that runs PPO: a module, and arguments before the settings file."""

ONE_MACHINE = Machines()
"""A training whose processes all run on this machine."""


def command(
    job: Path, processes: int, machines: Machines, program: Sequence[str] = PPO
) -> list[str]:
    """Return the command that starts the processes of this machine."""
    if processes * machines.count == 1:
        return [sys.executable, "-m", *program, str(job)]
    rendezvous = ["--standalone"]
    if machines.count > 1:
        # All machines compute the same id and port. Each attempt has a new port, because the old
        # port may be in use, and a new id, which keeps out machines of earlier attempts.
        name = f"{job.parent.name} {machines.attempt}"
        rendezvous_id = hashlib.sha256(name.encode()).hexdigest()[:16]
        port = PORTS[int(rendezvous_id, 16) % len(PORTS)]
        rendezvous = [
            f"--nnodes={machines.count}",
            # The static backend keeps the ranks of the machines. c10d would rank machines by name.
            # Rank 0 writes the policy and the metrics, so it must be on the first machine.
            "--rdzv-backend=static",
            f"--node-rank={machines.index}",
            f"--rdzv-endpoint={machines.main_address}:{port}",
            f"--rdzv-id={rendezvous_id}",
            f"--rdzv-conf=timeout={RENDEZVOUS_SECONDS}",
        ]
    torchrun = [sys.executable, "-m", "ppo_core.distributed.torchrun", *rendezvous]
    return [*torchrun, f"--nproc-per-node={processes}", "-m", *program, str(job)]


@dataclass(frozen=True)
class FoundGpu:
    """A GPU of this machine."""

    name: str
    """Name that CUDA or ROCm reports."""

    memory: int
    """Bytes of memory."""


def has_gpu_driver(devices: Path = Path("/dev")) -> bool:
    """Return whether a folder of device files has one of NVIDIA, of AMD, or of Windows (WSL2)."""
    names = ("nvidia[0-9]*", "nvidiactl", "kfd", "dxg")
    return any(any(devices.glob(name)) for name in names)


@cache
def found_gpus() -> tuple[FoundGpu, ...]:
    """Return the GPUs that torch finds on this machine."""
    if not has_gpu_driver():
        return ()
    # Run in a separate process, because importing torch is slow and takes much memory.
    facts = (
        "import json, torch; n = torch.cuda.device_count(); "
        "each = [torch.cuda.get_device_properties(i) for i in range(n)]; "
        "print(json.dumps([[one.name, one.total_memory] for one in each]))"
    )
    printed = subprocess.check_output([sys.executable, "-c", facts], text=True)
    return tuple(FoundGpu(*one) for one in json.loads(printed.splitlines()[-1]))


def gpus() -> int:
    """Return the number of GPUs that torch finds on this machine."""
    return len(found_gpus())


def environment_of(processes: int, machines: Machines, reason: Path) -> dict[str, str]:
    """Return the environment of the processes.

    A failed process writes its error to the file `reason`. On SIGUSR1, a process writes the stacks
    of its threads to the folder of `reason`.
    """
    root, flows = str(Path(ppo_core.__file__).parent.parent), str(Path(__file__).parents[2])
    # The folder of the flows comes last, so that a user's module with an equal name is found first.
    paths = [root, os.environ.get("PYTHONPATH", ""), flows]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        PARENT: str(os.getpid()),
        ERROR_FILE: str(reason),
        STACKS: str(reason.parent),
    }
    here = processes * (machines.count if machines.main_address == THIS_MACHINE else 1)
    if here > 1:
        threads = str(threads_of_a_process(here))
        environment |= {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    return environment


def threads_of_a_process(processes: int) -> int:
    """Return the number of threads of each process if several processes share this machine.

    The number is the process's share of the cores, or OMP_NUM_THREADS if this variable is lower.
    With more spinning threads than cores, training is many times slower. Of a list such as 8,2, the
    first number counts: OpenMP uses it for the outer threads.
    """
    share = max(len(os.sched_getaffinity(0)) // processes, 1)
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(int(given) or share, share) if given.isdecimal() else share
