"""The program of the step server: import modules, then fork for each step; see `forked_steps`.

`python step_server.py MODULE...` reads requests from a socket, its standard input, and ends when
the socket is closed and the last step has ended.
"""

import json
import os
import random
import selectors
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

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

    In the forked process, run the flow's file, and return or raise as the file does.
    """
    # Signals to all processes of a run are for the steps: they save a checkpoint and end.
    signals = {
        each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)
    }
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from ppo_core.distributed.process import end_with, large_imports

    with large_imports():
        for module in sys.argv[1:]:
            import_module(module)
    server = os.getpid()
    request = _next_step()
    if request is None:
        # To free every imported object would take seconds.
        os._exit(0)
    end_with(server)
    for each, handler in signals.items():
        signal.signal(each, handler)
    _become(request)
    _run_file(request.argv[0])


def _next_step() -> StepRequest | None:
    """Fork for each request; return it in the new process, and None in the server at its end."""
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
            else:
                process = os.fork()
                if not process:
                    return request
                for stream in request.streams:
                    os.close(stream)
                _send(request.status, process)
                # A process's file descriptor is readable when the process has ended.
                ended = os.pidfd_open(process)
                running[ended] = process, request.status
                waiting.register(ended, selectors.EVENT_READ)
    return None


def _receive(channel: socket.socket) -> StepRequest | None:
    """Return the next request; None if the run has ended."""
    length, files, _, _ = socket.recv_fds(channel, NUMBER, FILES)
    text = channel.recv(int.from_bytes(length), socket.MSG_WAITALL)
    if not text:
        return None
    status, *streams = files
    return StepRequest(**json.loads(text), status=socket.socket(fileno=status), streams=streams)


def _report_end(ended: int, process: int, status: socket.socket) -> None:
    os.close(ended)
    _send(status, os.waitpid(process, 0)[1])
    status.close()


def _send(status: socket.socket, number: int) -> None:
    # A run that was killed reads nothing.
    with suppress(OSError):
        status.sendall(number.to_bytes(NUMBER))


def _become(request: StepRequest) -> None:
    """Make this process the step: its streams, environment, folder and arguments."""
    request.status.close()
    streams = [os.open(os.devnull, os.O_RDONLY), *request.streams]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.argv[:] = request.argv
    sys.path[0] = os.path.dirname(os.path.realpath(request.argv[0]))
    # Otherwise all steps would draw the same numbers.
    random.seed()


def _run_file(path: str) -> None:
    """Run a file in this main module, where Metaflow has put names; runpy would replace it."""
    main = vars(sys.modules["__main__"])
    main["__file__"] = path
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main)


if __name__ == "__main__":
    serve()
