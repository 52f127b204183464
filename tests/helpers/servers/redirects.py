"""A server on 127.0.0.1 that redirects every request to a second server, which records requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class Redirect:
    """Addresses of both servers, and the requests that reached each of them."""

    url: str = ""
    target: str = ""
    asked: list[str] = field(default_factory=list)
    arrived: list[str] = field(default_factory=list)


@contextmanager
def redirecting_server(status: int) -> Iterator[Redirect]:
    """Redirect with `status` while the context lasts."""
    state = Redirect()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.reply()
            self.end_headers()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            pass

    class Source(Handler):
        def reply(self) -> None:
            state.asked.append(self.path)
            self.send_response(status)
            self.send_header("Location", state.target + self.path)
            self.send_header("Content-Length", "0")

    class Target(Handler):
        def reply(self) -> None:
            state.arrived.append(self.path)
            self.send_response(500)
            self.send_header("Content-Length", "0")

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in (Source, Target)]
    state.url, state.target = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [Thread(target=server.serve_forever, args=(0.02,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield state
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()
