"""Servers on 127.0.0.1 that accept every connection, and answer too slowly or never."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"

Talk = Callable[[socket.socket, threading.Event], None]
"""Talks to a client until the event is set."""


def say_nothing(client: socket.socket, closing: threading.Event) -> None:
    closing.wait()


def drip(client: socket.socket, closing: threading.Event) -> None:
    """Send one byte of the body at a time, which no time-out of a client notices."""
    client.sendall(HEAD + b"{")
    while not closing.wait(0.05):
        client.sendall(b" ")


def drip_the_head(client: socket.socket, closing: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not closing.wait(0.05):
        client.sendall(b"a")


def list_then_drip(client: socket.socket, closing: threading.Event) -> None:
    """List one file of an artifact store, and drip its content."""
    request = client.recv(4096)
    if b"path=" in request or b"manifest.json" not in request.split(b"\r\n")[0]:
        body = b'{"files": [{"path": "manifest.json", "is_dir": false, "file_size": 10}]}'
        length = str(len(body)).encode()
        client.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Content-Length: " + length + b"\r\n\r\n" + body
        )
    else:
        drip(client, closing)


@contextmanager
def slow_server(talk: Talk) -> Iterator[str]:
    """Run a server while the context lasts; yield its URL."""
    closing = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = listener.accept()
                threading.Thread(target=talk_to, args=(client,), daemon=True).start()

    def talk_to(client: socket.socket) -> None:
        with suppress(OSError), client:  # the client may have hung up
            talk(client, closing)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        closing.set()
        listener.close()
