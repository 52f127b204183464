"""Files that hold their old content or their new one after a crash, never a part of it."""

import os
from pathlib import Path
from uuid import uuid4


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write or replace a file in one step: to a hidden file beside it, which is then renamed.

    Processes of several machines may write the same path; the last rename wins.

    Args:
        path: the file, in a folder that exists.
        content: bytes, or text that is written as UTF-8.
        durable: return when the content and the name are on the disk, so that they survive a
            power cut. Without it they survive the end of the process only.

    Raises:
        OSError: the file cannot be written; the old one stays, and nothing is left beside it.
    """
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    if durable:
        sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Return when a file's content, or a folder's list of names, is on the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
