"""The lease of a folder of checkpoints: the newest holder may write, earlier ones may not.

A restarted run cannot know whether its predecessor is dead, frozen, or cut off from the network
and about to continue. So it takes a token above all earlier ones (a fencing token: Gray & Cheriton
1989, "Leases"), and only the holder of the highest token publishes or removes checkpoints.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from ppo_core.data.atomic_files import write_atomically
from ppo_core.errors import TrainingError

LEASE = "lease.json"
"""File in the folder that records the last claim."""

LOCK = ".lease.lock"

PATIENCE = 60.0
"""Seconds to wait for the lock, which is held only to rename and remove folders."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The claim of one process to a folder, valid until another process claims it."""

    folder: Path
    token: int
    """Number of the claim to the folder, from 1."""

    host: str
    pid: int
    started: str
    """Time of the claim, in UTC."""

    @classmethod
    def claim(cls, folder: Path) -> "Lease":
        """Acquire the lease of a folder, creating the folder; earlier holders lose it.

        Raises:
            TrainingError: the lock cannot be acquired, or the last claim cannot be read.
            OSError: the folder cannot be created or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            last = _read(folder)
            lease = cls(
                folder=folder,
                token=last.token + 1 if last else 1,
                host=socket.gethostname(),
                pid=os.getpid(),
                started=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            lease._write()
        return lease

    def check(self) -> None:
        """Raise if another process has claimed the folder since.

        Raises:
            TrainingError: one has; the message names it.
        """
        last = _read(self.folder)
        if last == self:
            return
        by = f"{last}" if last else f"someone who removed '{self.folder / LEASE}'"
        raise TrainingError(
            f"Another process took over '{self.folder}': {by}; this is {self}. This one stops, "
            "since two writers would mix their checkpoints. Let the other one continue; if it "
            "should not have started, end it and resume."
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from claiming the folder inside the context; keep it short.

        Raises:
            TrainingError: another process has already claimed the folder.
        """
        with _locked(self.folder):
            self.check()
            yield

    def __str__(self) -> str:
        """Return how error messages name the claim."""
        return f"process {self.pid} on {self.host} (token {self.token}, since {self.started})"

    def _write(self) -> None:
        entries = asdict(self)
        del entries["folder"]
        write_atomically(self.folder / LEASE, json.dumps(entries))


def _read(folder: Path) -> Lease | None:
    path = folder / LEASE
    try:
        return Lease(folder=folder, **json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise TrainingError(
            f"'{path}' cannot be read: {error}. It records which process writes the checkpoints "
            "beside it; without it two runs could mix their checkpoints. Make sure that no other "
            "run writes there, remove the file, and resume."
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        with FileLock(folder / LOCK, timeout=PATIENCE):
            yield
    except Timeout as error:
        raise TrainingError(
            f"'{folder / LOCK}' was not free for {PATIENCE:.0f} seconds: the last claim to the "
            f"folder is by {_read(folder) or 'an unknown process'}, which may be frozen while it "
            "writes a checkpoint. End it, and resume."
        ) from error
