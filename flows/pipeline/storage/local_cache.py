"""Cache on this disk for files from S3, by digest of the content and with a maximum size."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

SHARE_OF_DISK = 0.5
"""Fraction of the disk that the cache may fill. Contents that a process uses are never removed."""


class LocalCache:
    """A folder with one subfolder for each content; `identity` is the name of a subfolder."""

    def __init__(self, root: Path, *, limit_bytes: int | None = None) -> None:
        """Use `root`, which need not exist. The default of `limit_bytes` is SHARE_OF_DISK."""
        self._root = root
        self._limit = limit_bytes

    @contextmanager
    def filling(self, identity: str) -> Iterator[Path]:
        """Yield the folder of a content for this process to complete; other processes wait.

        The name of an incomplete folder ends in `.part`, so it is never mistaken for a complete
        folder. At the end of the context, the least recently used contents are removed until the
        cache meets its limit.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        complete = self._root / identity
        partial = self._root / f"{identity}.part"
        with FileLock(self._root / f"{identity}.lock"):
            self._use(identity)
            folder = complete if complete.is_dir() else partial
            folder.mkdir(exist_ok=True)
            yield folder
            if folder == partial:
                partial.rename(complete)
            os.utime(complete)
        self._remove_unused()

    def path(self, identity: str) -> Path:
        """Return the folder of a content that `filling` has completed."""
        return self._root / identity

    def _use(self, identity: str) -> None:
        """Keep other processes from removing a content until this process ends."""
        # NFS allows a shared lock only on a file that is open for reading.
        with self._used(identity).open("a+b") as file:
            # The duplicate is never closed, so the lock lasts until this process ends.
            fcntl.flock(os.dup(file.fileno()), fcntl.LOCK_SH)

    def _remove_unused(self) -> None:
        sizes, times = {}, {}
        for folder in self._root.iterdir():
            # Another process may fill or remove the folder meanwhile.
            with suppress(FileNotFoundError):
                if folder.is_dir():
                    times[folder], sizes[folder] = folder.stat().st_mtime, _size_of(folder)
        excess = sum(sizes.values()) - self._limit_bytes()
        for folder in sorted(sizes, key=times.__getitem__):
            if excess <= 0:
                return
            if self._remove(folder):
                excess -= sizes[folder]

    def _remove(self, folder: Path) -> bool:
        """Remove a content unless a process uses it; return whether it was removed."""
        # Folders of unfinished files end in `.part`, or `.part.part`.
        identity = folder.name.partition(".")[0]
        with self._used(identity).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)
            (self._root / f"{identity}.arrived").unlink(missing_ok=True)
        return True

    def _used(self, identity: str) -> Path:
        return self._root / f"{identity}.used"

    def _limit_bytes(self) -> float:
        if self._limit is not None:
            return self._limit
        return shutil.disk_usage(self._root).total * SHARE_OF_DISK


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
