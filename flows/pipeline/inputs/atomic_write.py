"""Write a file so that every reader finds either its old or its new content."""

import os
import socket
import threading
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file under a temporary name, then rename it.

    Threads, processes and machines that share the folder may write the same file at a time.

    Args:
        path: the file.
        content: its new content.
        durable: whether the content is on the disk when this returns, which takes longer.
    """
    writer = f"{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}"
    unfinished = path.with_name(f".{path.name}.{writer}")
    with unfinished.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    unfinished.replace(path)
