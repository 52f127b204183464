"""Fork the steps of a run on this machine from a step server that has imported their modules.

Each step runs in its own process, which would need 5 to 9 seconds to import torch, transformers and
MLflow. The server imports these modules once. Metaflow starts steps on other machines as usual.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from metaflow import runtime

from metaflow_glue import step_server
from metaflow_glue.step_server import NUMBER

REMOTE = ("batch", "kubernetes")
"""Metaflow's commands that run a step on another machine and wait for it. In the arguments, such a
command comes directly before the word `step`."""

GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of the drivers of NVIDIA and AMD."""


def fork_steps(modules: Sequence[str]) -> None:
    """Fork the steps of a Metaflow run from a step server.

    Metaflow has no setting for how a step starts, so this function replaces the module `subprocess`
    in Metaflow's runtime. On systems other than Linux, it does nothing, because a process that has
    imported native libraries must not be forked there. On a machine with a GPU, it does nothing,
    because an import may initialize CUDA.

    Args:
        modules: modules that the server imports.
    """
    if sys.platform != "linux" or any(os.path.exists(device) for device in GPUS):
        return
    forking = ModuleType("subprocess")
    vars(forking).update(vars(subprocess), Popen=StepServer(modules).start)
    runtime.subprocess = forking


class StepServer:
    """The client of a server process that forks for each step; the first step starts the server."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Store the names of the modules that the server imports."""
        self._modules = modules

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> "ForkedStep | subprocess.Popen[bytes]":
        """Start a step; Metaflow calls this method instead of `subprocess.Popen`.

        A step that runs with this Python on this machine is forked. Any other step is started as a
        new process. If the server has died, every step is started as a new process.
        """
        is_here = "step" in argv and argv[argv.index("step") - 1] not in REMOTE
        step = self._fork(argv[1:], env) if is_here and argv[0] == sys.executable else None
        return step or subprocess.Popen(argv, env=env, **options)

    def _fork(self, argv: Sequence[str], env: Mapping[str, str]) -> "ForkedStep | None":
        """Return a forked step, or None if the server has died."""
        request = {"argv": argv, "environment": dict(env), "folder": os.getcwd()}
        text = json.dumps(request).encode()
        (output, to_output), (error, to_error) = os.pipe(), os.pipe()
        status, to_status = socket.socketpair()
        try:
            streams = [to_status.fileno(), to_output, to_error]
            socket.send_fds(self._channel, [len(text).to_bytes(NUMBER)], streams)
            self._channel.sendall(text)
        except OSError:
            pass  # The server has died, so `ForkedStep` receives no process id below.
        finally:
            to_status.close()
            os.close(to_output)
            os.close(to_error)
        step = ForkedStep(status, output, error)
        return step if step.pid else None

    @cached_property
    def _channel(self) -> socket.socket:
        """Start the server, and return the socket of its requests."""
        here, there = socket.socketpair()
        # The flow's file will run in the main module, so this program must define no name there.
        program = f"__import__({step_server.__name__!r}, fromlist=['serve']).serve()"
        with there:
            subprocess.Popen(
                [sys.executable, "-u", "-c", program, *self._modules],
                cwd=Path(__file__).parents[1],
                # Like the pipes of a step, which replace it later, a socket is not seekable. Python
                # checks this property of each stream only when Python starts.
                stdin=there.fileno(),
                stdout=there.fileno(),
                stderr=there.fileno(),
            )
        return here


class ForkedStep:
    """A forked step, with the part of the interface of `Popen` that Metaflow's runtime uses."""

    def __init__(self, status: socket.socket, output: int, error: int) -> None:
        """Wait until the server has forked; `pid` is 0 if the server has died.

        Args:
            status: socket on which the server sends the process id, and at the end the wait status.
            output: file descriptor of the step's standard output.
            error: file descriptor of the step's standard error.
        """
        self._status = status
        self.stdout, self.stderr = os.fdopen(output, "rb"), os.fdopen(error, "rb")
        self.pid = self._receive() or 0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the step runs."""
        self._status.setblocking(False)
        try:
            return self.wait()
        except BlockingIOError:
            return None
        finally:
            self._status.setblocking(True)

    def wait(self) -> int:
        """Wait for the end of the step, and return its exit code."""
        if self.returncode is None:
            status = self._receive()
            # If no status arrives, the server has died, and the kernel has killed the step.
            killed = -signal.SIGKILL
            self.returncode = killed if status is None else os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """Kill the step if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _receive(self) -> int | None:
        """Return the next number from the server, or None if the server has died."""
        try:
            number = self._status.recv(NUMBER)
        except ConnectionError:
            return None
        return int.from_bytes(number) if number else None
