"""Fork the steps of a run on this machine, and the programs that write a step's last card.

Each step runs in its own process, which would need 5 to 9 seconds to import torch, transformers and
MLflow (see `pipeline.launch.fork_server`). At the end of a step, Metaflow writes its card by two
programs, each of which would import Metaflow and the flow. Metaflow has no setting for how it
starts programs, so the functions below replace the module `subprocess` in a module of Metaflow.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from metaflow import runtime
from metaflow.plugins.cards import card_creator

from pipeline.launch.commands import has_gpu_driver
from pipeline.launch.forked_processes import ForkedProcess, ForkServer

REMOTE = ("batch", "kubernetes")
"""Metaflow's commands that run a step on another machine and wait for it. In the arguments, such a
command comes directly before the word `step`. The option `--with` takes the same words."""


def fork_steps(modules: Sequence[str]) -> None:
    """Fork the steps of a Metaflow run from a fork server.

    This function does nothing if `--with` sends all steps to other machines, if the machine has a
    GPU (an import may initialize CUDA), or on another system than Linux (a process that has
    imported native libraries must not be forked there).

    Args:
        modules: modules that the server imports.
    """
    is_remote = any(word.partition(":")[0] in REMOTE for word in sys.argv)
    if sys.platform == "linux" and not is_remote and not has_gpu_driver():
        runtime.subprocess = _subprocess_with(Popen=StepServer(modules).start)


def fork_cards(server: ForkServer) -> None:
    """Fork the programs that write the last card of this step from the step's fork server."""
    card_creator.subprocess = _subprocess_with(check_output=CardServer(server).check_output)


def _subprocess_with(**functions: Any) -> ModuleType:
    """Return a copy of the module `subprocess` with other functions."""
    forking = ModuleType("subprocess")
    vars(forking).update(vars(subprocess), **functions)
    return forking


class StepServer:
    """Starts the steps of a run."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Start a fork server that imports `modules`."""
        self._server = ForkServer.start(modules)

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> ForkedProcess | subprocess.Popen[bytes]:
        """Start a step; Metaflow calls this method instead of `subprocess.Popen`.

        A step that runs with this Python on this machine is forked, if the server can fork it. Any
        other step is started as a new process.
        """
        is_here = "step" in argv and argv[argv.index("step") - 1] not in REMOTE
        step = self._fork(argv[1:], env) if is_here and argv[0] == sys.executable else None
        return step or subprocess.Popen(argv, env=env, **options)

    def _fork(self, argv: Sequence[str], env: Mapping[str, str]) -> ForkedProcess | None:
        """Return a forked step, or None if the server cannot fork it."""
        (output, to_output), (error, to_error) = os.pipe(), os.pipe()
        step = self._server.fork(argv, env, output=to_output, error=to_error, has_server=True)
        os.close(to_output)
        os.close(to_error)
        if step is None:
            os.close(output)
            os.close(error)
        else:
            step.stdout, step.stderr = os.fdopen(output, "rb"), os.fdopen(error, "rb")
        return step

    def close(self) -> None:
        """Let the server end after the last step."""
        self._server.close()


class CardServer:
    """Runs the programs that write cards."""

    def __init__(self, server: ForkServer) -> None:
        """Store the fork server of this step."""
        self._server = server

    def check_output(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float | None = None,
        **options: Any,
    ) -> bytes:
        """Run a program; Metaflow calls this method instead of `subprocess.check_output`.

        Return the standard output and error of the program.

        Raises:
            CalledProcessError: the program failed.
            TimeoutExpired: the program did not end within `timeout` seconds, and was killed.
        """
        with tempfile.TemporaryFile() as file:
            process = self._server.fork(argv[1:], env, output=file.fileno(), error=file.fileno())
            if process is None:
                return subprocess.check_output(argv, env=env, timeout=timeout, **options)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            file.seek(0)
            output = file.read()
        if code:
            raise subprocess.CalledProcessError(code, argv, output)
        return output
