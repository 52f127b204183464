"""Start Python programs in forked processes, which need not import large modules again.

A fork server forks the processes, see `fork_server`. Steps that no server has forked, for example
on another machine, have no server, and start their trainings as new processes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, ClassVar

NUMBER = 8
"""Bytes of a number in a message: the length of a request, a process id, a wait status."""

OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
"""Environment variables that OpenMP reads when torch is imported."""


def openmp_settings(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables in OPENMP, with None for a variable that is not set."""
    return {name: environment.get(name) for name in OPENMP}


class ForkServer:
    """The client of a process that forks for each program to run."""

    of_this_process: "ClassVar[ForkServer | None]" = None
    """The fork server of this process, if the process has one."""

    def __init__(self, channel: socket.socket, openmp: Mapping[str, str | None]) -> None:
        """Store the socket for requests, and the settings of OpenMP that the server has."""
        self._channel, self._openmp = channel, openmp

    @classmethod
    def start(cls, modules: Sequence[str]) -> "ForkServer":
        """Start a server that imports `modules`; it ends with this process."""
        here, there = socket.socketpair()
        # The forked file will run in the main module, so this program must define no name there.
        program = "__import__('pipeline.launch.fork_server', fromlist=['serve']).serve()"
        with there:
            subprocess.Popen(
                [sys.executable, "-u", "-c", program, *modules],
                cwd=Path(__file__).parents[2],
                # A forked program replaces these sockets with pipes. Python checks only at its
                # start whether a stream is seekable; neither a socket nor a pipe is seekable.
                stdin=there.fileno(),
                stdout=there.fileno(),
                stderr=there.fileno(),
            )
        return cls(here, openmp_settings(os.environ))

    def fork(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: int,
        error: int,
        has_server: bool = False,
    ) -> "ForkedProcess | None":
        """Return a forked process, or None if the server cannot fork it.

        The server may have died, or may have imported torch with other settings of OpenMP.

        Args:
            argv: the arguments of Python: a file or `-m MODULE`, and the arguments of the program.
            environment: environment of the process.
            output: file descriptor of the standard output.
            error: file descriptor of the standard error.
            has_server: whether the process gets a fork server.
        """
        if openmp_settings(environment) != self._openmp:
            return None
        request = {
            "argv": argv,
            "environment": dict(environment),
            "folder": os.getcwd(),
            "has_server": has_server,
        }
        text = json.dumps(request).encode()
        status, to_status = socket.socketpair()
        try:
            streams = [to_status.fileno(), output, error]
            socket.send_fds(self._channel, [len(text).to_bytes(NUMBER)], streams)
            self._channel.sendall(text)
        except OSError:
            pass  # The server has died, so no process id arrives below.
        finally:
            to_status.close()
        pid = receive_number(status)
        return ForkedProcess(pid, status) if pid else None

    def close(self) -> None:
        """Let the server end after its last process."""
        self._channel.close()


class ForkedProcess:
    """A forked process, with a part of the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        """Store the process id, and the socket on which the server sends the wait status."""
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its exit code.

        Raises:
            TimeoutExpired: the process has not ended after `timeout` seconds.
        """
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                status = receive_number(self._status)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None
            # If no status arrives, the server has died, and the kernel has killed the process.
            killed = -signal.SIGKILL
            self.returncode = killed if status is None else os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """Kill the process if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signal.SIGKILL)


def receive_number(status: socket.socket) -> int | None:
    """Return the next number from the server, or None if the server has died."""
    try:
        number = status.recv(NUMBER)
    except ConnectionError:
        return None
    return int.from_bytes(number) if number else None


def start_python(
    argv: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start Python; the process has the output of this process.

    The process is forked if this process has a fork server that can fork it.

    Args:
        argv: path of Python, and its arguments; see `ForkServer.fork`.
        environment: environment of the process.
    """
    server = ForkServer.of_this_process
    forked = server and server.fork(argv[1:], environment, output=1, error=2)
    return forked or subprocess.Popen(argv, env=environment)
