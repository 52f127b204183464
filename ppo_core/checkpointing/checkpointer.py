"""Write the checkpoints of a run between its steps, and resume from them bit for bit."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ppo_core.checkpointing.disks import Disk, find_disk
from ppo_core.checkpointing.lease import Lease
from ppo_core.checkpointing.read_checkpoint import (
    Checkpoint,
    Forms,
    checkpoint_folders,
    read_checkpoint,
    read_newest,
)
from ppo_core.checkpointing.write_checkpoint import Part, save_checkpoint
from ppo_core.distributed.exchange_objects import ProcessGroup
from ppo_core.errors import ConfigError, reason_of
from ppo_core.io.atomic_files import require_creatable, unwritable


class Contents(Protocol):
    """The state of a run that a checkpoint stores; all processes must call the methods."""

    @property
    def step(self) -> int:
        """Number of steps of the run that are done; the checkpoint's name contains this number."""

    def part(self) -> Part:
        """Return a copy of the files that this process writes."""

    def restore(self, checkpoint: Checkpoint, *, anyway: bool) -> None:
        """Continue from a checkpoint; with `anyway`, also from a checkpoint of another run."""


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """Where and how the checkpoints of a run are written."""

    folder: Path
    """Folder of the run; each checkpoint is a subfolder."""

    saves: bool
    """Whether the run writes checkpoints; otherwise only a callback can request one."""

    keep: int | None
    """Number of newest checkpoints to keep; None keeps all."""

    in_background: bool = False
    """Whether checkpoints are written while training continues."""

    timeout: float
    """Seconds that a process waits for other processes."""


class Checkpointer:
    """Writes and restores the checkpoints of one run.

    All processes must call the methods; each process writes a part of a checkpoint.
    """

    def __init__(self, contents: Contents, plan: SavePlan, forms: Forms) -> None:
        """Create a checkpointer of a run without writing any file.

        `forms` are the types that the content of a checkpoint's JSON files must have.
        """
        self._contents, self._plan, self._forms = contents, plan, forms
        self._peers = self._writers = ProcessGroup()
        self._lease: Lease | None = None
        self._disk: Disk | None = None
        self._saver = AsyncWriter(in_background=self._plan.in_background)

    def start(self, resume: str | Path | bool | None, *, anyway: bool = False) -> None:
        """Acquire the lease of `output_dir`, and restore a checkpoint if `resume` asks for one.

        Only the process with the lease may write checkpoints, see `ppo_core.checkpointing.lease`.
        A run that saves no checkpoints acquires no lease.

        Args:
            resume: the folder of a checkpoint; True for the newest undamaged checkpoint, if
                `output_dir` has one; None or False to start a new run.
            anyway: accept a checkpoint of another run, and log the differences as a warning.

        Raises:
            ConfigError: `output_dir` cannot be created; or the run saves checkpoints, `resume` is
                off, and `output_dir` contains checkpoints of an earlier run.
            TrainingError: the checkpoint is damaged, or belongs to another run; or the lease cannot
                be acquired.
        """
        if not resume and self._contents.step:
            return  # this trainer continues its own run
        patience = self._plan.timeout
        self._peers = ProcessGroup.meet(patience)
        # The thread that writes needs its own process group, so that its messages do not mix with
        # the messages of the training.
        self._writers = ProcessGroup.meet(patience) if self._plan.in_background else self._peers
        if not resume and self._plan.saves:
            self._peers.together(lambda: refuse_earlier_run(self._plan.folder))
        if self._plan.saves:
            self._lease = self._claim()
        else:
            # Even without checkpoints, the policy will be saved in output_dir.
            require_creatable(self._plan.folder, "output_dir")
        checkpoint = None
        if resume is True:
            checkpoint = read_newest(self._plan.folder, self._peers, self._forms)
        elif resume:
            checkpoint = read_checkpoint(Path(resume), self._peers, self._forms)
        if checkpoint is not None:
            self._contents.restore(checkpoint, anyway=anyway)

    def check_writer(self) -> None:
        """Raise if another process has acquired the lease of `output_dir`.

        Raises:
            TrainingError: another process has the lease; raised in all processes.
        """
        lease = self._lease
        if lease is not None:
            self._peers.together(lambda: lease.check() if self._leads() else None)

    def save(self) -> None:
        """Write everything that the next step depends on to `output_dir/checkpoint-<step>`.

        With `in_background`, wait for the previous checkpoint and copy the contents, which are then
        written while training continues.

        Raises:
            TrainingError: the checkpoint (with `in_background`, the previous checkpoint) could not
                be written; raised in all processes.
        """
        # Copy only after the previous copy was written, so that memory holds one copy.
        self._saver.wait()
        # With save_strategy="no" there is no lease yet, but a callback can request a checkpoint.
        lease = self._lease = self._lease or self._claim()
        folder = self._plan.folder / f"checkpoint-{self._contents.step}"
        write = partial(
            save_checkpoint,
            folder,
            self._contents.part(),
            peers=self._writers,
            disk=self._disk,
            writer=f"{lease.token}",
            held=lease.held,
            keep=self._plan.keep,
        )
        self._saver.save(write)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            TrainingError: the checkpoint could not be written; raised in all processes.
        """
        self._saver.wait()

    def _claim(self) -> Lease:
        folder = self._plan.folder
        try:
            self._disk = find_disk(folder, self._peers)
            claims: list[Any] = self._peers.together(
                lambda: Lease.claim(folder) if self._leads() else None
            )
        except OSError as error:
            raise unwritable(folder, "output_dir", reason_of(error)) from error
        lease: Lease = claims[self._disk.leader]
        return lease

    def _leads(self) -> bool:
        """Return whether this process publishes the checkpoints on its disk."""
        return self._disk is not None and self._peers.rank == self._disk.leader


def refuse_earlier_run(folder: Path) -> None:
    """Raise if the folder of a new run has checkpoints.

    Raises:
        ConfigError: there is a checkpoint.
    """
    earlier = checkpoint_folders(folder)
    if earlier:
        raise ConfigError(
            f"'{earlier[0]}' belongs to an earlier run. The checkpoints of both runs would mix, "
            "and a later resume could take the wrong checkpoint. Resume with "
            "resume_from_checkpoint, choose another output_dir, or remove the old checkpoints."
        )


class AsyncWriter:
    """Writes one checkpoint at a time.

    With `in_background`, `save` returns while a thread writes the checkpoint. The next call of
    `save` or `wait` raises the thread's error, if there was one. The interpreter does not exit
    before the thread has finished.
    """

    def __init__(self, *, in_background: bool) -> None:
        """Create the writer; the background thread starts with the first checkpoint."""
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._pending: Future[None] | None = None

    def save(self, write: Callable[[], None]) -> None:
        """Wait for the previous checkpoint, then call `write`, which writes the next checkpoint.

        Raises:
            TrainingError: this checkpoint or the previous one could not be written.
        """
        self.wait()
        if self._thread is None:
            write()
        else:
            self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            TrainingError: the checkpoint could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
