"""Measuring processes, from the side of their parent."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.benchmarks.tasks import Task, Update

ROOT = Path(__file__).parent.parent.parent
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
ERROR_LINES = 15


class MeasurementError(Exception):
    """A measuring process ended without a result."""


class Worker:
    """A process that loads models once and runs one update per call."""

    def __init__(self, task: Task, *, trl_python: Path = TRL_PYTHON) -> None:
        self.task = task
        python = trl_python if task.side == "trl" else Path(sys.executable)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed at the exit)
        self._process = subprocess.Popen(
            [python, "-m", f"tests.benchmarks.measure_{task.side}", task.to_json()],
            cwd=ROOT,
            env=environment(task),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def wait_until_ready(self) -> None:
        """Wait until the process has loaded its models.

        Raises:
            MeasurementError: the process ended; the message has its last lines.
        """
        self._read_line()

    def run_update(self) -> Update:
        """Run one PPO step in the process.

        Raises:
            MeasurementError: the process ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Update(**json.loads(self._read_line()))

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MeasurementError(self._why_it_ended())
        return line

    def _why_it_ended(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        last = "".join(self._errors.readlines()[-ERROR_LINES:])
        return f"The process for {self.task} ended with {code}:\n{last}"


def environment(task: Task) -> dict[str, str]:
    """Return the environment of a process: the task's number of threads, and no network."""
    threads = str(task.threads)
    settings = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    if task.side == "trl" and task.bf16:
        # TRL's `bf16` setting does not reach accelerate.
        settings["ACCELERATE_MIXED_PRECISION"] = "bf16"
    return {**os.environ, **settings}


def run_python(
    module: str, *arguments: str, threads: int = 2, python: str | Path = sys.executable
) -> str:
    """Run a module of this package in a new process; return its standard output.

    Raises:
        MeasurementError: the process failed.
    """
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    ended = subprocess.run(
        [python, "-m", f"tests.benchmarks.{module}", *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        last: Sequence[str] = ended.stderr.splitlines()[-ERROR_LINES:]
        raise MeasurementError(f"{module} ended with {ended.returncode}:\n" + "\n".join(last))
    return ended.stdout
