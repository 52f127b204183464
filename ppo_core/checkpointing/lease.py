"""The lease of a checkpoint folder: only its newest holder may write checkpoints there.

A restarted run cannot know whether its predecessor is dead, frozen, or cut off from the network
and about to continue. So the restarted run takes a token higher than all earlier tokens (a fencing
token: Gray & Cheriton 1989, "Leases"). Only the holder of the highest token publishes or removes
checkpoints.
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
from pydantic import BaseModel

from ppo_core.errors import TrainingError
from ppo_core.errors.control_characters import escape_controls
from ppo_core.errors.wrong_clock import describe_future
from ppo_core.io.atomic_files import write_atomically
from ppo_core.io.text_files import parse_json
from ppo_core.io.validation import Natural, read_record

LEASE = "lease.json"
"""Name of the file that records the last claim to the folder."""

LOCK = ".lease.lock"

TIMEOUT = 60.0
"""Seconds to wait for the lock, which is held only to claim, rename and remove folders."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The claim of one process to a folder, valid until another process claims the folder."""

    folder: Path
    token: int
    """Number of the claim, from 1; each new claim to the folder has a higher number."""

    host: str
    pid: int
    started: str
    """Time of the claim, in UTC."""

    @classmethod
    def claim(cls, folder: Path) -> "Lease":
        """Create a folder if necessary and acquire its lease; earlier holders lose the lease.

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
        """Raise if another process has claimed the folder after this claim.

        Raises:
            TrainingError: another process has claimed the folder; the message names the process.
        """
        last = _read(self.folder)
        if last == self:
            return
        owner = last or f"an unknown process, because '{self.folder / LEASE}' was removed"
        raise TrainingError(
            f"Another process took over '{self.folder}': {owner}. This process ({self}) stops, "
            "because the checkpoints of two processes would mix. Let the other process continue. "
            "If it was started by mistake, end it and resume."
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from claiming the folder inside the context, which must be short.

        Raises:
            TrainingError: another process has already claimed the folder.
        """
        with _locked(self.folder):
            self.check()
            yield

    def __str__(self) -> str:
        """Return the description of the claim in error messages."""
        return escape_controls(
            f"process {self.pid} on {self.host} (token {self.token}, since {self.started}"
            f"{describe_future(self.started)})"
        )

    def _write(self) -> None:
        entries = asdict(self)
        del entries["folder"]
        write_atomically(self.folder / LEASE, json.dumps(entries))


class _Claim(BaseModel):
    token: Natural
    host: str
    pid: Natural
    started: str


def _read(folder: Path) -> Lease | None:
    path = folder / LEASE
    try:
        claim = read_record(parse_json(path.read_bytes()), _Claim)
        return Lease(folder=folder, **dict(claim))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise TrainingError(
            f"'{path}' cannot be read: {error}. The file records which process writes checkpoints "
            "in this folder, so that two runs do not mix their checkpoints. Make sure that no "
            "other run writes to the folder, remove the file, and resume."
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        with FileLock(folder / LOCK, timeout=TIMEOUT):
            yield
    except Timeout as error:
        raise TrainingError(
            f"The lock '{folder / LOCK}' was not free for {TIMEOUT:.0f} seconds. The last claim "
            f"to the folder is by {_read(folder) or 'an unknown process'}, which may have frozen "
            "while it wrote a checkpoint. End that process, and resume."
        ) from error
