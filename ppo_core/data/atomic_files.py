"""Atomic writes of files: after a crash, a file has its full old or its full new content."""

import os
from pathlib import Path
from uuid import uuid4


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Create or replace a file atomically: write a hidden temporary file, then rename it.

    Several machines may write the same path at the same time; the last rename wins.

    Args:
        path: the file, in an existing folder.
        content: bytes, or text to be encoded as UTF-8.
        durable: sync the file and its folder to disk before returning, so that the new content
            survives a power failure, and not only a crash of the process.

    Raises:
        OSError: the file cannot be written. An existing file is unchanged, and the temporary file
            is removed.
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
    """Sync a file's content, or a folder's list of names, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
