"""Start Python programs in forked processes, which need not import large modules again.

A fork server forks the processes, see `fork_server`. Steps that no server has forked, for example
on another machine, have no server, and start their trainings as new processes.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, ClassVar, NamedTuple

NUMBER = 8
"""Bytes of a number in a message, such as a process id or a wait status."""

OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
"""Environment variables that OpenMP reads when torch is imported."""


def openmp_settings(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables in OPENMP, with None for a variable that is not set."""
    return {name: environment.get(name) for name in OPENMP}


class Used(NamedTuple):
    """What processes have used."""

    cpu_microseconds: int = 0
    peak_rss_bytes: int = 0
    """Peak memory of the largest process."""

    def plus(self, other: "Used") -> "Used":
        """Return what these and other processes have used."""
        return Used(
            self.cpu_microseconds + other.cpu_microseconds,
            max(self.peak_rss_bytes, other.peak_rss_bytes),
        )

    @classmethod
    def of(cls, used: resource.struct_rusage) -> "Used":
        """Return what the kernel has counted."""
        # Linux counts the memory in KiB.
        unit = 1 if sys.platform == "darwin" else 1024
        return cls(round(1e6 * (used.ru_utime + used.ru_stime)), used.ru_maxrss * unit)


class ForkServer:
    """The client of a process that forks for each program to run."""

    of_this_process: "ClassVar[ForkServer | None]" = None
    """The fork server of this process, if the process has one."""

    def __init__(self, channel: socket.socket, openmp: Mapping[str, str | None]) -> None:
        """Store the socket for requests, and the settings of OpenMP that the server has."""
        self._channel, self._openmp = channel, openmp
        self.used = Used()
        """What the processes have used that have ended and were waited for."""

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
        numbers = receive_numbers(status, 1)
        return ForkedProcess(numbers[0], status, self) if numbers else None

    def close(self) -> None:
        """Let the server end after its last process."""
        self._channel.close()


class ForkedProcess:
    """A forked process, with a part of the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, status: socket.socket, server: ForkServer) -> None:
        """Store the process id, and the socket on which the server tells the end of the process."""
        self.pid, self._server = pid, server
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
                numbers = receive_numbers(self._status, 1 + len(Used._fields))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None
            # If no message arrives, the server has died, and the kernel has killed the process.
            status, *used = numbers or [signal.SIGKILL]
            self.returncode = os.waitstatus_to_exitcode(status)
            self._server.used = self._server.used.plus(Used(*used))
        return self.returncode

    def kill(self) -> None:
        """Kill the process if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signal.SIGKILL)


def receive_numbers(status: socket.socket, count: int) -> list[int]:
    """Return the next numbers from the server, or an empty list if the server has died."""
    try:
        numbers = status.recv(count * NUMBER)
    except ConnectionError:
        return []
    starts = range(0, len(numbers), NUMBER)
    return [int.from_bytes(numbers[start : start + NUMBER]) for start in starts]


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


def used_by_children() -> Used:
    """Return what the ended child processes of this process have used.

    The processes that its fork server has forked are included.
    """
    used = Used.of(resource.getrusage(resource.RUSAGE_CHILDREN))
    server = ForkServer.of_this_process
    return used.plus(server.used) if server else used
