"""Who may write the checkpoints of a folder: the newest claim wins, an earlier writer is shut out.

A run that is started again cannot know whether its predecessor is dead, frozen, or cut off from
the network and about to go on. So it takes a number above all earlier ones (a fencing token:
Gray & Cheriton 1989, "Leases"), and nothing is put into place or removed without the highest.
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
"""File in the folder that says who claimed it last."""

LOCK = ".lease.lock"

PATIENCE = 60.0
"""Seconds to wait for the lock; whoever has it renames and removes folders, nothing else."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """One process's claim to a folder, good until another process claims it."""

    folder: Path
    token: int
    """Counts the claims to the folder, from 1."""

    host: str
    pid: int
    started: str
    """When it was claimed, in UTC."""

    @classmethod
    def claim(cls, folder: Path) -> "Lease":
        """Become the writer of a folder, which is made; whoever was it before is shut out.

        Raises:
            TrainingError: the lock is not to be had, or the last claim cannot be read.
            OSError: the folder cannot be made or written.
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
        """See that no other process has claimed the folder since.

        Raises:
            TrainingError: one has; the message says which.
        """
        last = _read(self.folder)
        if last == self:
            return
        by = f"{last}" if last else f"someone who removed '{self.folder / LEASE}'"
        raise TrainingError(
            f"Another process took over '{self.folder}': {by}; this is {self}. This one stops, "
            "since two that write the same checkpoints would mix them. Let the other one go on; "
            "if it should not have started, end it and resume."
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other process can claim the folder: for a few quick operations.

        Raises:
            TrainingError: another process has claimed it before.
        """
        with _locked(self.folder):
            self.check()
            yield

    def __str__(self) -> str:
        """How it is called in an error."""
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
            f"'{path}' cannot be read: {error}. It says who writes the checkpoints beside it, and "
            "without it two runs could mix theirs. See that no other run writes there, remove the "
            "file, and resume."
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        with FileLock(folder / LOCK, timeout=PATIENCE):
            yield
    except Timeout as error:
        raise TrainingError(
            f"'{folder / LOCK}' was not free for {PATIENCE:.0f} seconds: the last that claimed the "
            f"folder is {_read(folder) or 'not known'}. It may be frozen while it writes a "
            "checkpoint. End it, and resume."
        ) from error
