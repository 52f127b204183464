"""Find out which processes of a run have their checkpoints on the same disk."""

from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from uuid import uuid4

from ppo_core.distributed.exchange_objects import ProcessGroup

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The processes of a run that use the same disk."""

    ranks: tuple[int, ...]
    """Ranks of the processes, in ascending order."""

    @property
    def leader(self) -> int:
        """Rank of the process that publishes the checkpoints on this disk."""
        return self.ranks[0]


def find_disk(folder: Path, peers: ProcessGroup) -> Disk:
    """Return the processes for which `folder` is the same folder as for this process.

    All processes must call this function.

    Raises:
        OSError: the folder cannot be created or written.
        TrainingError: another process cannot create or write its folder.
    """
    # Use new names in each call, because files of a killed run may still be there.
    call = peers.of_main(uuid4().hex)
    marks = [folder / f".seen-{call}-{rank}" for rank in range(peers.number)]

    def mark() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        marks[peers.rank].touch()

    try:
        peers.together(mark)
        seen = tuple(rank for rank, path in enumerate(marks) if path.exists())
        # Wait until each process has looked for the marks, before the first mark is removed.
        peers.together(lambda: None)
    finally:
        marks[peers.rank].unlink(missing_ok=True)
    return Disk(ranks=seen)


def find_mount(folder: Path, peers: ProcessGroup) -> Disk:
    """Return the processes of this machine for which `folder` is the same folder; write nothing.

    If several machines share a disk, they count as several disks. All processes must call this
    function.
    """
    try:
        status = folder.stat()
        # Machines from one image may have equal names, but each boot of a machine has its own id.
        boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
        own = (gethostname(), boot, status.st_dev, status.st_ino)
    except OSError:
        own = None
    mounts = peers.exchange(own)
    return Disk(ranks=tuple(rank for rank, mount in enumerate(mounts) if mount == own))
