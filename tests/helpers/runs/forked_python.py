"""Python programs of tests, in processes forked from one that has imported torch.

Importing torch, transformers and DeepSpeed takes longer than training a tiny model. Here a fork
server imports them once for all programs. Tests of launchers, of imports and of the flow start new
processes instead.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from ppo_core.distributed.process import PARENT
from tests.helpers.paths import ROOT

IMPORTED = [
    "deepspeed",
    "ppo_core.training.cli",
    "ppo_core.supervised.training",
    "ppo_core.classic",
    "tests.helpers.models.tiny",
]
"""Modules that the fork server imports; saving a model imports DeepSpeed."""

STREAMS = ("stdout", "stderr")

TIMEOUT = 20.0
"""Seconds that the other processes have to end after SIGTERM, once one has failed."""


@dataclass(frozen=True)
class Ended:
    """The end of a program."""

    codes: list[int]
    """Exit code of each process; for a signal, the negative signal number."""

    stdout: str
    stderr: str

    @property
    def returncode(self) -> int:
        """The first exit code that is not 0."""
        return next(filter(None, self.codes), 0)


def run_python(
    *words: object,
    folder: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    processes: int = 1,
    seconds: float = 240,
) -> Ended:
    """Run `python WORDS` in `folder` and wait for its end.

    Several processes are those of `torchrun --nproc-per-node`: when one fails, the others get
    SIGTERM.

    Args:
        words: `-m MODULE`, `-c CODE` or a script, and its arguments.
        folder: working folder.
        variables: changes to the environment.
        processes: number of processes.
        seconds: processes that take longer are killed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    ranks = _ranks(processes) if processes > 1 else [{}]
    context = _context()
    with TemporaryDirectory() as output:
        running = [
            context.Process(
                target=_run, args=(list(map(str, words)), str(folder), environment | rank, output)
            )
            for rank in ranks
        ]
        files = [Path(output, name) for name in STREAMS]
        for file in files:
            file.touch()
        for process in running:
            process.start()
        try:
            _wait(running, seconds)
        finally:
            _signal(running, signal.SIGKILL)
        said = [file.read_text() for file in files]
    return Ended([process.exitcode or 0 for process in running], *said)


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    variables = {
        # The server does not get sys.path of this process.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HF_HOME": _hub().name,
    }
    with patch.dict(os.environ, variables):
        forkserver.ensure_running()
    return context


@cache
def _hub() -> TemporaryDirectory[str]:
    """Return the cache of data sets, in the place of the one in the user's home."""
    return TemporaryDirectory()


def _ranks(processes: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets in each process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    size = str(processes)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return [{**shared, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(processes)]


def _wait(running: Sequence[Any], seconds: float) -> None:
    """Wait until all processes have ended."""
    give_up, is_told = time.monotonic() + seconds, False
    while any(process.is_alive() for process in running):
        if time.monotonic() > give_up:
            _signal(running, signal.SIGKILL)
            give_up = time.monotonic() + TIMEOUT
        elif not is_told and any(process.exitcode for process in running):
            _signal(running, signal.SIGTERM)
            give_up, is_told = time.monotonic() + TIMEOUT, True
        time.sleep(0.02)


def _signal(running: Sequence[Any], number: signal.Signals) -> None:
    for process in running:
        if process.is_alive():
            os.kill(process.pid, number)


def _run(words: list[str], folder: str, environment: dict[str, str], output: str) -> None:
    """Run the program in this process."""
    os.environ.clear()
    os.environ |= environment
    if "RANK" in environment:
        os.environ[PARENT] = str(os.getppid())
    os.chdir(folder)
    for number, name in enumerate(STREAMS, start=1):
        os.dup2(os.open(f"{output}/{name}", os.O_WRONLY | os.O_APPEND), number)
    try:
        _interpret(words)
    finally:
        # A process of multiprocessing does not call them at its end.
        atexit._run_exitfuncs()


def _interpret(words: list[str]) -> None:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    match words:
        case ["-m", module, *arguments]:
            sys.argv = [module, *arguments]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *arguments]:
            sys.argv = ["-c", *arguments]
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [script, *_]:
            sys.argv = words
            sys.path.insert(0, str(Path(script).absolute().parent))
            runpy.run_path(script, run_name="__main__")
