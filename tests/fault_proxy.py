"""A proxy in front of a server that loses replies and stops whoever asks."""

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
import pytest
import requests

fork = get_context("fork")


@dataclass
class Fault:
    """What is done, once, to a request whose path ends in `path` and whose body holds `word`."""

    path: str
    word: str = ""
    before: Callable[[], None] = lambda: None
    """Before the server sees the request."""

    after: Callable[[], None] = lambda: None
    """When the server has done it, before the reply is sent."""

    drop: bool = False
    """Whether the connection is closed instead of the reply."""

    times: int = 1
    happened: threading.Event = field(default_factory=threading.Event)


@dataclass
class FaultProxy:
    """Forwards everything to `target`, apart from its faults."""

    target: str
    url: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, fault: Fault) -> Fault:
        self.faults.append(fault)
        return fault

    def take(self, path: str, body: bytes) -> Fault | None:
        """The fault of this request, which happens once less from now on."""
        with self.lock:
            self.requests.append(path)
            for fault in self.faults:
                if path.endswith(fault.path) and fault.word.encode() in body and fault.times:
                    fault.times -= 1
                    return fault
        return None


@contextmanager
def fault_proxy(target: str) -> Iterator[FaultProxy]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = proxy.take(self.path.partition("?")[0], body) or Fault("")
            fault.before()
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
            """A client that was killed is no news."""

    server = Server(("127.0.0.1", 0), Handler)
    proxy = FaultProxy(target, f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()


def start_process(work: Callable[[], object], url: str):
    """`work` in a process of its own, which knows MLflow under `url`."""

    def run() -> None:
        os.environ["MLFLOW_TRACKING_URI"] = url
        mlflow.set_tracking_uri(None)
        work()

    process = fork.Process(target=run, daemon=True)
    process.start()
    return process


def stop(pid: int) -> None:
    """Stop a process where it is; returns when it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def use(url: str, patch: pytest.MonkeyPatch) -> None:
    """MLflow is there for the rest of the test."""
    patch.setenv("MLFLOW_TRACKING_URI", url)
    patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    patch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    patch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    mlflow.set_tracking_uri(None)
