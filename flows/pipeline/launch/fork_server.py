"""A fork server: a process that imports modules once, and forks for each program to run.

Its client is `forked_processes`. The server of a run forks the steps. Each of these steps has a
server of its own, which forks the trainings. A step that has computed with several threads must not
fork, because the new process would lack OpenMP's threads. So the server of a step is forked before
the step begins.

`serve` reads requests from its standard input, which is a socket. It ends when the client has
closed the socket and all forked processes have ended. If the code changes during a run, the change
affects only the modules that the server has not imported.
"""

import atexit
import gc
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias

from pipeline.launch.forked_processes import NUMBER, ForkServer, Used, openmp_settings
from ppo_core.distributed.process import PARENT, end_with, large_imports, outlive_parent

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that Ctrl+C and a scheduler may send to all processes of a run."""

FLOWS = Path(__file__).parents[2]
"""Folder of the flows."""

FILES = 3
"""File descriptors of a request: status, standard output and error."""

Handlers: TypeAlias = Mapping[
    signal.Signals, "Callable[[int, FrameType | None], object] | int | None"
]


@dataclass(frozen=True)
class Request:
    """A program to run in a forked process."""

    argv: list[str]
    """A file or `-m MODULE`, and the arguments of the program."""

    environment: dict[str, str]
    folder: str
    """Working directory."""

    has_server: bool
    """Whether the process gets a fork server."""

    status: socket.socket
    """Socket for the process id, and at the end for the wait status."""

    streams: list[int]
    """Standard output and error."""


def serve() -> None:
    """Import the modules of the command line, and fork for each request.

    A forked process runs its program and ends as the program does.
    """
    handlers, openmp = _ignore_signals(), openmp_settings(os.environ)
    _set_streams([os.open(os.devnull, os.O_WRONLY) for _ in range(2)])
    # End with the client during the imports: no forked process needs the server yet.
    end_with(os.getppid())
    with large_imports():
        for module in sys.argv[1:]:
            import_module(module)
    outlive_parent()
    _serve(socket.socket(fileno=os.dup(sys.stdin.fileno())), handlers, openmp)


def _ignore_signals() -> Handlers:
    """Ignore SIGNALS, and return the handlers that a program needs.

    On a signal, the programs save a checkpoint and end. The server must outlive the programs,
    because it reports their exit codes.
    """
    return {each: signal.signal(each, signal.SIG_IGN) for each in SIGNALS}


def _serve(
    channel: socket.socket, handlers: Handlers, openmp: Mapping[str, str | None]
) -> NoReturn:
    """Fork for each request that arrives on a socket; run the program in the forked process.

    `openmp` are the settings of OpenMP with which torch was imported.
    """
    server = os.getpid()
    request = _next_request(channel)
    if request is None:
        # A normal exit would take seconds, because Python would free every imported object.
        os._exit(0)
    channel.close()
    end_with(server)
    for each, handler in handlers.items():
        signal.signal(each, handler)
    _become(request)
    own_channel = _fork_server(openmp) if request.has_server else None
    if own_channel:
        handlers = _ignore_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        _serve(own_channel, handlers, openmp)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _exit(_run(request.argv))


def _fork_server(openmp: Mapping[str, str | None]) -> socket.socket | None:
    """Fork a server for this process; return its socket in the server, and None in this process."""
    here, there = socket.socketpair()
    program = os.getpid()
    try:
        process = os.fork()
    except OSError:
        here.close()
        there.close()
        return None  # The program has no fork server.
    if process == 0:
        here.close()
        end_with(program)
        return there
    there.close()
    ForkServer.of_this_process = ForkServer(here, openmp)
    return None


def _next_request(channel: socket.socket) -> Request | None:
    """Fork for each request, and return the request in the new process.

    In the server, return None after the last process has ended.
    """
    # If `pidfd_open` is missing or forbidden, the server dies here, before it accepts a request.
    os.close(os.pidfd_open(os.getpid()))
    running: dict[int, tuple[int, socket.socket]] = {}
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


def _receive(channel: socket.socket) -> Request | None:
    """Return the next request; None if the client has ended."""
    length, files, _, _ = socket.recv_fds(channel, NUMBER, FILES)
    text = channel.recv(int.from_bytes(length), socket.MSG_WAITALL)
    if not text or len(text) < int.from_bytes(length):
        return None
    status, *streams = files
    return Request(**json.loads(text), status=socket.socket(fileno=status), streams=streams)


def _fork(request: Request) -> int | None:
    """Fork, and return the process id as `os.fork` does; None if there is no new process."""
    process = None
    # A signal to the new process must wait until its handlers are set.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    # If the fork fails, the client receives no process id, and starts a new process itself.
    with suppress(OSError):
        process = os.fork() if _is_wanted(request) else None
    if process != 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for stream in request.streams:
            os.close(stream)
        if process is None:
            request.status.close()
        else:
            _send(request.status, process)
    return process


def _is_wanted(request: Request) -> bool:
    """Return whether the client still waits; it may have ended during the imports."""
    with suppress(BlockingIOError):
        return bool(request.status.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return True


def _report_end(ended: int, process: int, status: socket.socket) -> None:
    os.close(ended)
    _, code, used = os.wait4(process, 0)
    _send(status, code, *Used.of(used))
    status.close()


def _send(status: socket.socket, *numbers: int) -> None:
    # If the client was killed, nobody reads the numbers.
    with suppress(OSError):
        status.sendall(b"".join(number.to_bytes(NUMBER) for number in numbers))


def _become(request: Request) -> None:
    """Give this process the streams, environment, working directory and arguments of a program."""
    request.status.close()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    _set_streams(request.streams)
    os.environ.clear()
    os.environ.update(request.environment)
    if PARENT in os.environ:
        # This program ends with its parent, which is the server. The server ends with the process
        # that sent the request.
        os.environ[PARENT] = str(os.getppid())
    os.chdir(request.folder)
    # Without new seeds, all programs would draw the same random numbers.
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


def _run(argv: Sequence[str]) -> int:
    """Run a program as Python does with these arguments, and return its exit code.

    An error, and `sys.exit` with a text, are passed on: Python prints them and exits with code 1.
    """
    try:
        # Relative paths of PYTHONPATH count from the program's folder, not from the server's.
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [os.path.abspath(path) for path in given if path]
        if argv[0] == "-m":
            _forget_flows()
            sys.path[:1] = [os.getcwd(), *paths]
            sys.argv[:] = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[:1] = [os.path.dirname(os.path.realpath(argv[0])), *paths]
            sys.argv[:] = argv
            _run_file(os.path.abspath(argv[0]))
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0
    return 0


def _forget_flows() -> None:
    """Forget the imported modules of the flows, so that a user's module of equal name is found."""
    for name, module in [*sys.modules.items()]:
        file = vars(module).get("__file__")
        if isinstance(file, str) and file.startswith(f"{FLOWS}{os.sep}"):
            del sys.modules[name]


def _run_file(path: str) -> None:
    """Run a file as the main module.

    `runpy` would replace the main module with a new module, but Metaflow has already stored names
    in the main module.
    """
    main = vars(sys.modules["__main__"])
    main["__file__"] = path
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main)


def _exit(code: int) -> NoReturn:
    """End this process as Python does, but do not free the imported objects.

    Freeing them takes up to a second: their memory is shared with the server, and the kernel copies
    a shared page before it is written.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    # List the files first: an exit function may call gc.freeze, which hides all objects.
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]
    atexit._run_exitfuncs()
    for file in (*files, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a broken pipe, or a closed file
            file.flush()
    os._exit(code)
