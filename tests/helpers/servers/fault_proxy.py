"""A proxy in front of a server that loses replies and stops clients."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context

import mlflow
import psutil
import requests

fork = get_context("fork")


@dataclass
class Fault:
    """A fault of requests whose path ends in `path` and whose body contains `word`."""

    path: str = ""
    word: str = ""
    changes: bool = False
    """Whether only requests that change something are affected."""

    again: bool = True
    """Whether requests of the same method and path may be affected twice."""

    skip: int = 0
    """Matching requests to let through first."""

    before: Callable[[], None] = lambda: None
    """Called before the server gets the request."""

    after: Callable[[], None] = lambda: None
    """Called after the server has answered, before the reply is sent."""

    drop: bool = False
    """Whether the connection is closed instead of a reply."""

    lose: bool = False
    """Whether the connection is closed before the server gets the request."""

    times: int = 1
    hits: list[str] = field(default_factory=list)
    """The affected requests."""

    happened: threading.Event = field(default_factory=threading.Event)

    def hit(self, request: str, body: bytes) -> bool:
        """Return whether this request is affected, and count it."""
        changing = not request.startswith("GET") and not request.endswith("/search")
        if (
            not self.times
            or not request.endswith(self.path)
            or self.word.encode() not in body
            or (self.changes and not changing)
            or (request in self.hits and not self.again)
        ):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        self.hits.append(request)
        return True


@dataclass
class FaultProxy:
    """Forwards requests to `target`, except for its faults."""

    target: str
    url: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""

    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, fault: Fault) -> Fault:
        self.faults.append(fault)
        return fault

    def take(self, request: str, body: bytes) -> Fault:
        """Return the fault of this request, or a fault that does nothing."""
        with self.lock:
            self.requests.append(request)
            return next((fault for fault in self.faults if fault.hit(request, body)), Fault())


@contextmanager
def fault_proxy(target: str) -> Iterator[FaultProxy]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # Sends a reply in one piece; a second one would wait for an ACK.

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0].rpartition("mlflow/")[2]
            fault = proxy.take(f"{self.command} {path}", body)
            fault.before()
            if fault.lose:
                self.close_connection = True
                return
            headers = {"Content-Type": self.headers.get("Content-Type", "")}
            reply = requests.request(
                self.command, target + self.path, data=body, headers=headers, timeout=60
            )
            fault.after()
            fault.happened.set()
            if fault.drop:
                self.close_connection = True
                return
            self.send_response(reply.status_code)
            self.send_header("Content-Type", reply.headers["Content-Type"])
            self.send_header("Content-Length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = forward  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Ignore clients that were killed."""

    server = Server(("127.0.0.1", 0), Handler)
    proxy = FaultProxy(target, f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()


def start_process(work: Callable[[], object], url: str):
    """Run `work` in a process of its own, with MLflow at `url`."""

    def run() -> None:
        os.environ["MLFLOW_TRACKING_URI"] = url
        mlflow.set_tracking_uri(None)
        work()

    process = fork.Process(target=run, daemon=True)
    process.start()
    return process


def stop(pid: int) -> None:
    """Send SIGSTOP to a process and wait until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
