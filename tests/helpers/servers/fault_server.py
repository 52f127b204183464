"""A chat server on 127.0.0.1 with faults that a test chooses."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behavior = Callable[[BaseHTTPRequestHandler], None]
"""Writes the response to a request."""


@dataclass(frozen=True)
class Request:
    """A request to the server."""

    number: int
    """From 0, in the order of arrival."""

    path: str
    body: dict[str, Any]
    authorization: str

    arrived: float
    """Seconds of `time.time`, the clock of HTTP dates."""

    @property
    def question(self) -> str:
        """The text of the last message."""
        return self.body["messages"][-1]["content"]


@dataclass
class FaultServer:
    """The requests to a running server."""

    url: str
    requests: list[Request] = field(default_factory=list)
    under_way: int = 0
    """Requests whose response has not started."""

    most_under_way: int = 0
    arrival: threading.Condition = field(default_factory=threading.Condition)
    closing: threading.Event = field(default_factory=threading.Event)

    def arrives(self, handler: BaseHTTPRequestHandler) -> Request:
        """Record a request."""
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.arrival:
            request = Request(
                number=len(self.requests),
                path=handler.path,
                body=body,
                authorization=handler.headers.get("Authorization", ""),
                arrived=time.time(),
            )
            self.requests.append(request)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.arrival.notify_all()
        return request

    def is_decided(self) -> None:
        """Record that the response to a request starts."""
        with self.arrival:
            self.under_way -= 1

    def wait_for(self, requests: int, seconds: float = 60) -> None:
        """Wait until `requests` requests have arrived."""
        with self.arrival:
            assert self.arrival.wait_for(lambda: len(self.requests) >= requests, seconds)


Script = Callable[[Request], Behavior] | Sequence[Behavior]
"""A function from request to behavior, which may block; or behaviors in order, of which the last
one repeats."""


@contextmanager
def fault_server(script: Script) -> Iterator[FaultServer]:
    """Run a server while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = state.arrives(self)
            behave = script(request) if callable(script) else script[min(request.number, last)]
            # Before the response: a client that has read it may send the next request at once.
            state.is_decided()
            with suppress(ConnectionError):  # the client may have hung up
                behave(self)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    last = 0 if callable(script) else len(script) - 1
    server = Server(("127.0.0.1", 0), Handler)
    state = FaultServer(f"http://127.0.0.1:{server.server_port}/v1")
    server.closing = state.closing  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def respond(status: int, body: str, **headers: str) -> Behavior:
    """Return a response; `_` in the name of a header stands for `-`."""

    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body.encode())

    return behave


def say(text: str | None, *, tokens: int | None = 7, finish_reason: str = "stop") -> Behavior:
    """Return a chat completion, without `usage` if tokens is None."""
    message = {"role": "assistant", "content": text}
    completion: dict[str, Any] = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "model",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }
    if tokens is not None:
        completion["usage"] = {
            "prompt_tokens": tokens - 1,
            "completion_tokens": 1,
            "total_tokens": tokens,
        }
    return respond(200, json.dumps(completion), Content_Type="application/json")


def refuse(status: int, message: str = "no", **headers: str) -> Behavior:
    """Return an error in OpenAI's format."""
    body = {"error": {"message": message, "type": "error", "code": None}}
    return respond(status, json.dumps(body), Content_Type="application/json", **headers)


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection without a response."""
    handler.close_connection = True


def drip(handler: BaseHTTPRequestHandler) -> None:
    """Send a space, which JSON may begin with, every 20 ms without end."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    while not handler.server.closing.wait(0.02):  # type: ignore[attr-defined]
        handler.wfile.write(b" ")
