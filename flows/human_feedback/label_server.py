"""Serve a local web page on which a person labels pairs of answers."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_urlsafe
from threading import Lock

from human_feedback.labeling import Labeling
from ppo_core.errors import PPOError

PAGE = Path(__file__).with_name("label_page.html")

MOST_BYTES = 10_000
"""Maximum size of a request."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class _Server(ThreadingHTTPServer):
    """A server on 127.0.0.1 for one `Labeling`."""

    def __init__(self, labeling: Labeling, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.labeling = labeling
        self.secret, self.lock = token_urlsafe(16), Lock()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if not self._is_ours():
            self._reply(404, "text/plain", "There is no such page.")
        elif self.path == f"/{self.server.secret}/":
            self._reply(200, "text/html; charset=utf-8", PAGE.read_text(encoding="utf-8"))
        elif self.path == f"/{self.server.secret}/pair":
            # Write the reply after the lock is released: a client may be slow.
            with self.server.lock:
                state = json.dumps(self.server.labeling.state())
            self._reply(200, "application/json", state)
        else:
            self._reply(404, "text/plain", "There is no such page.")

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if not self._is_ours() or self.path != f"/{self.server.secret}/pair":
            self._reply(404, "text/plain", "There is no such page.")
        elif not size.isdecimal():
            self._reply(411, "text/plain", "The request has no Content-Length.")
        elif int(size) > MOST_BYTES:
            self._reply(413, "text/plain", "The request is too large.")
        else:
            # Read before the lock is taken: a client may be slow.
            body = self.rfile.read(int(size))
            with self.server.lock:
                reply = self._label(body)
            self._reply(*reply)

    def _label(self, body: bytes) -> tuple[int, str, str]:
        """Store the label of a request; return status, type and text of the reply."""
        try:
            given = json.loads(body)
            if given["label"] == "undo":
                self.server.labeling.undo()
            else:
                self.server.labeling.label(int(given["number"]), str(given["label"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            return 400, "text/plain", "The request is not a label."
        except PPOError as error:
            return 400, "text/plain", str(error)
        return 200, "application/json", json.dumps(self.server.labeling.state())

    def _is_ours(self) -> bool:
        # Refuse other host names: a foreign name may resolve to 127.0.0.1 (DNS rebinding).
        # Browsers leave out port 80 in the header Host.
        host = f"127.0.0.1:{self.server.server_port}".removesuffix(":80")
        return self.headers.get("Host") == host

    def _reply(self, status: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


def label_server(labeling: Labeling, port: int) -> tuple[ThreadingHTTPServer, str]:
    """Return a server on 127.0.0.1, not started yet, and the address of its page.

    The address contains a secret, so that no other web page in the browser can send labels. With
    `port` 0, a free port is chosen.
    """
    server = _Server(labeling, port)
    return server, f"http://127.0.0.1:{server.server_port}/{server.secret}/"
