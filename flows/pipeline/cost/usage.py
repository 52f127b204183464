"""Measure the GPU and CPU seconds of each attempt of a step, and write them to the run's folder.

The file of a running attempt is rewritten every WRITE_SECONDS seconds. If an attempt is killed, its
file contains the seconds until the last write.
"""

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from threading import Event, Thread

from pipeline.inputs.flow_run import FlowRun
from pipeline.launch.commands import found_gpus
from pipeline.launch.forked_processes import Used, used_by_children
from pipeline.results.report_files import read_report
from ppo_core.errors import DataError
from ppo_core.io.atomic_files import write_atomically

FOLDER = "usage"
"""Subfolder of a run's folder, with one file for each attempt of a step."""

WRITE_SECONDS = 30.0
"""Seconds between two writes of the file of a running attempt."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a step, on all its machines."""

    step: str
    started: float
    """Seconds since 1970."""

    seconds: float = 0.0
    """Duration; until the last write of the file if the attempt is running or was killed."""

    cpu_seconds: float = 0.0
    """CPU seconds of the attempt on all cores of the first machine."""

    machines: int = 1
    gpus: int = 0
    """Number of GPUs of each machine."""

    gpu: str = ""
    """Name of the GPU that CUDA reports; empty without a GPU."""

    gpu_memory: int = 0
    """Bytes of memory of each GPU."""

    @property
    def gpu_seconds(self) -> float:
        """GPU seconds: duration x GPUs of all machines."""
        return self.seconds * self.gpus * self.machines


@contextmanager
def measured(step: str, run: FlowRun, machines: int) -> Iterator[None]:
    """Measure an attempt of a step, and write it to a file; call this only on the first machine.

    Args:
        step: name of the step.
        run: the run of the flow.
        machines: number of machines that share the step.
    """
    found = found_gpus()
    attempt = Attempt(
        step=step,
        started=time.time(),
        machines=machines,
        gpus=len(found),
        gpu=found[0].name if found else "",
        gpu_memory=found[0].memory if found else 0,
    )
    started, cpu = time.perf_counter(), _cpu_seconds()

    def write() -> None:
        seconds = time.perf_counter() - started
        _write(run, replace(attempt, seconds=seconds, cpu_seconds=_cpu_seconds() - cpu))

    def write_often() -> None:
        while not ended.wait(WRITE_SECONDS):
            write()

    write()
    ended = Event()
    writer = Thread(target=write_often, name="usage", daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()
        write()


def recorded_attempts(run: FlowRun) -> list[Attempt]:
    """Return the attempts of all steps so far, in the order of their start.

    A damaged file is left out with a warning, so that no step fails because of its cost.
    """
    attempts = []
    for file in (run.folder / FOLDER).glob("*.json"):
        try:
            attempts.append(read_report(file, Attempt))
        except DataError as error:
            print(f"Warning: The cost of an attempt is not counted: {error}", flush=True)
    return sorted(attempts, key=lambda attempt: attempt.started)


def gpu_hours(run: FlowRun) -> float:
    """Return the GPU hours of a run so far, with all attempts of all steps on all machines.

    An attempt that was killed is missing if its file was lost together with its machine.
    """
    return sum(attempt.gpu_seconds for attempt in recorded_attempts(run)) / 3600


def _write(run: FlowRun, attempt: Attempt) -> None:
    """Write the file of an attempt. A disk error is only printed, so it does not end the step."""
    file = run.folder / FOLDER / f"{attempt.step}-{attempt.started:.3f}.json"
    try:
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, json.dumps(asdict(attempt)))
    except OSError as error:
        print(f"Warning: The cost of {attempt.step} is not recorded: {error}", flush=True)


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    own = Used.of(resource.getrusage(resource.RUSAGE_SELF))
    return own.plus(used_by_children()).cpu_microseconds / 1e6
