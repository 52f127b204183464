"""The step server: a process that imports modules once, and forks for each step of a run.

Its client is `forked_steps`.

`serve` reads requests from its standard input, which is a socket. It ends when the socket is closed
and the last step has ended. If the code changes during a run, the change affects only the modules
that the server has not imported.
"""

import json
import os
import random
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ppo_core.distributed.process import end_with, large_imports

NUMBER = 8
"""Bytes of a number in a message: the length of a request, a process id, a wait status."""

FILES = 3
"""File descriptors of a request: status, standard output and error."""


@dataclass(frozen=True)
class StepRequest:
    """A step to start."""

    argv: list[str]
    """File of the flow, and its arguments."""

    environment: dict[str, str]
    folder: str
    """Working directory."""

    status: socket.socket
    """Socket for the process id, and at the end for the wait status."""

    streams: list[int]
    """Standard output and error."""


def serve() -> None:
    """Import the modules of the command line, and fork for each request.

    The forked process runs the flow's file and ends as the file does.
    """
    # Ctrl+C and SIGTERM may reach all processes of a run. The server ignores both signals, and the
    # steps save a checkpoint and end.
    signals = {
        each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)
    }
    _set_streams([os.open(os.devnull, os.O_WRONLY) for _ in range(2)])
    with large_imports():
        for module in sys.argv[1:]:
            import_module(module)
    server = os.getpid()
    request = _next_step()
    if request is None:
        # A normal exit would take seconds, because Python would free every imported object.
        os._exit(0)
    end_with(server)
    for each, handler in signals.items():
        signal.signal(each, handler)
    _become(request)
    _run_file(os.path.abspath(request.argv[0]))


def _next_step() -> StepRequest | None:
    """Fork for each request, and return the request in the new process.

    In the server, return None after the last step has ended.
    """
    # If `pidfd_open` is missing or forbidden, the server dies here, before it accepts a step.
    os.close(os.pidfd_open(os.getpid()))
    running: dict[int, tuple[int, socket.socket]] = {}
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    waiting = selectors.PollSelector()
    waiting.register(channel, selectors.EVENT_READ)
    while waiting.get_map():
        for key, _ in waiting.select():
            if key.fileobj is not channel:
                waiting.unregister(key.fileobj)
                _report_end(key.fd, *running.pop(key.fd))
            elif (request := _receive(channel)) is None:
                waiting.unregister(channel)
            elif process := _fork(request):
                # The file descriptor of a process becomes readable when the process ends.
                ended = os.pidfd_open(process)
                running[ended] = process, request.status
                waiting.register(ended, selectors.EVENT_READ)
            elif process == 0:
                for ended in running:
                    os.close(ended)
                return request
    return None


def _receive(channel: socket.socket) -> StepRequest | None:
    """Return the next request; None if the run has ended."""
    length, files, _, _ = socket.recv_fds(channel, NUMBER, FILES)
    text = channel.recv(int.from_bytes(length), socket.MSG_WAITALL)
    if not text or len(text) < int.from_bytes(length):
        return None
    status, *streams = files
    return StepRequest(**json.loads(text), status=socket.socket(fileno=status), streams=streams)


def _fork(request: StepRequest) -> int | None:
    """Fork, and return the process id as `os.fork` does; None if there is no new process."""
    process = None
    # If the fork fails, the run receives no process id, and starts the step itself.
    with suppress(OSError):
        process = os.fork() if _is_wanted(request) else None
    if process != 0:
        for stream in request.streams:
            os.close(stream)
        if process is None:
            request.status.close()
        else:
            _send(request.status, process)
    return process


def _is_wanted(request: StepRequest) -> bool:
    """Return whether the run still waits; the run may have ended during the imports."""
    with suppress(BlockingIOError):
        return bool(request.status.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return True


def _report_end(ended: int, process: int, status: socket.socket) -> None:
    os.close(ended)
    _send(status, os.waitpid(process, 0)[1])
    status.close()


def _send(status: socket.socket, number: int) -> None:
    # If the run was killed, nobody reads the number.
    with suppress(OSError):
        status.sendall(number.to_bytes(NUMBER))


def _become(request: StepRequest) -> None:
    """Give this process the step's streams, environment, working directory and arguments."""
    request.status.close()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    _set_streams(request.streams)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.argv[:] = request.argv
    sys.path[0] = os.path.dirname(os.path.realpath(request.argv[0]))
    # Without new seeds, all steps would draw the same random numbers.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "datasets" in sys.modules:
        sys.modules["datasets"].fingerprint.fingerprint_rng.seed()


def _set_streams(streams: Sequence[int]) -> None:
    """Redirect standard output and error to two file descriptors, and close the descriptors."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)


def _run_file(path: str) -> None:
    """Run a file as the main module.

    `runpy` would replace the main module with a new module, but Metaflow has already stored names
    in the main module.
    """
    main = vars(sys.modules["__main__"])
    main["__file__"] = path
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main)
