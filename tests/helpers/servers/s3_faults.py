"""A proxy in front of S3 that spoils some of the replies."""

import http.client
import itertools
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ERRORS = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "403": (403, "AccessDenied"),
    "skew": (403, "RequestTimeTooSkewed"),
}
"""Faults that are answers of S3: status and code."""

SPOILT = ("reset", "lost", "half", "short", "bytes", "checksum", "drip")
"""Faults of a reply: the connection breaks before S3 acts, after it, or after half of the body;
there are fewer bytes than S3 has; a byte or the checksum is wrong; the body comes slowly. Beside
these, the fault "sip" lets the body of a request pass slowly."""

DRIP_SECONDS = 0.05
"""Wait between two pieces of 64 bytes."""


@dataclass
class S3Faults:
    """What the proxy does to the replies."""

    target: str
    kinds: Sequence[str] = ()
    share: float = 0.0
    """Fraction of the requests with a fault."""

    skip: int = 0
    """Requests to let through first."""

    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Faults that happened, by kind."""

    sent: int = 0
    """Bytes of bodies of replies to GET that were sent."""

    received: int = 0
    """Bytes of bodies of requests."""

    at_once: int = 0
    """Requests that the proxy works on."""

    most_at_once: int = 0

    number: Iterator[int] = field(default_factory=itertools.count)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self) -> str:
        """Return the fault of this request; empty if it has none."""
        with self.lock:
            number = next(self.number)
            if number < self.skip or not self.kinds:
                return ""
            draw = random.Random(f"{self.seed} {number}")
            fault = draw.choice(list(self.kinds)) if draw.random() < self.share else ""
            if fault:
                self.counts[fault] += 1
            return fault


@contextmanager
def faulty_s3(target: str) -> Iterator[tuple[S3Faults, str]]:
    """Run the proxy in front of the server at `target`; yield its faults and its address."""
    faults = S3Faults(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: object) -> None:
            pass

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (ConnectionError, TimeoutError):
                self.close_connection = True

        def pass_on(self) -> None:
            with faults.lock:
                faults.at_once += 1
                faults.most_at_once = max(faults.most_at_once, faults.at_once)
            try:
                self.work()
            finally:
                with faults.lock:
                    faults.at_once -= 1

        def work(self) -> None:
            if self.headers.get("Expect", "").lower() == "100-continue":
                pass  # http.server has answered it
            fault, length = faults.next_fault(), int(self.headers.get("Content-Length", 0))
            if fault == "sip":
                for _ in range(0, length, 64 << 10):
                    self.rfile.read(64 << 10)
                    time.sleep(DRIP_SECONDS)
            body = self.rfile.read(length)
            with faults.lock:
                faults.received += len(body)
            if fault == "reset":
                return self.reset()
            if fault in ERRORS:
                return self.error(*ERRORS[fault])
            address = urlsplit(faults.target)
            server = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
            server.request(self.command, self.path, body, dict(self.headers.items()))
            reply = server.getresponse()
            content = reply.read()
            headers = {
                name: value
                for name, value in reply.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "date", "server")
            }
            server.close()
            if fault == "lost":
                return self.reset()
            self.reply(reply.status, headers, content, fault)

        def reply(self, status: int, headers: dict[str, str], body: bytes, fault: str) -> None:
            if self.command == "GET" and body:
                if fault == "bytes":
                    body = body[:-1] + bytes([body[-1] ^ 1])
                if fault == "short":
                    body = body[: len(body) // 2]
                # S3 sends no checksum of an error.
                if fault == "checksum" and status < 300:
                    headers["x-amz-checksum-crc32"] = "AAAAAA=="
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() != "content-length":
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else len(body)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command == "HEAD":
                return
            if fault == "half":
                self.wfile.write(body[: len(body) // 2])
                return self.reset()
            if fault == "drip":
                for start in range(0, len(body), 64):
                    self.wfile.write(body[start : start + 64])
                    time.sleep(DRIP_SECONDS)
                return
            self.wfile.write(body)
            with faults.lock:
                faults.sent += len(body) if self.command == "GET" else 0

        def error(self, status: int, code: str) -> None:
            text = f"<Error><Code>{code}</Code><Message>planted</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        def reset(self) -> None:
            """Close the connection so that the client gets a reset."""
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            self.connection.close()

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield faults, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
