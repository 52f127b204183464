"""The checkpoints of a run: written between its steps, and gone on from to the bit."""

from functools import partial
from pathlib import Path
from typing import Any

from ppo_core.checkpointing.async_writer import AsyncWriter
from ppo_core.checkpointing.contents import CheckpointContents
from ppo_core.checkpointing.files import (
    latest_checkpoint,
    read_checkpoint,
    read_newest,
    save_checkpoint,
)
from ppo_core.checkpointing.lease import Lease
from ppo_core.distributed.process_group import ProcessGroup
from ppo_core.errors import ConfigError


class Checkpointer:
    """Writes and resumes the checkpoints of one run; all processes call, and each writes a part."""

    def __init__(self, contents: CheckpointContents) -> None:
        """Write nothing yet."""
        self._contents = contents
        self._config, self._run = contents.config, contents.run
        self._peers = self._writers = ProcessGroup()
        self._lease: Lease | None = None
        self._saver = AsyncWriter(in_background=self._config.async_save)

    def start(self, resume: str | Path | bool | None, *, anyway: bool = False) -> None:
        """Become the writer of `output_dir`, and go on from a checkpoint if that is asked for.

        `resume` is a checkpoint's folder, or True for the newest that is whole; where there is
        none, the run starts. With `anyway` a checkpoint of another run is taken, and what
        is different is a warning.

        Raises:
            ConfigError: `output_dir` cannot be made, or holds an earlier run's checkpoints that are
                not resumed from.
            TrainingError: the checkpoint is damaged, or belongs to another run.
        """
        if not resume and self._run.updates:
            return  # the same trainer goes on
        patience = self._config.ddp_timeout
        self._peers = ProcessGroup.meet(patience)
        # What is written meanwhile must not mix with what the training says.
        self._writers = ProcessGroup.meet(patience) if self._config.async_save else self._peers
        if not resume:
            self._peers.together(self._refuse_earlier)
        if self._config.save_strategy != "no":
            self._lease = self._claim()
        checkpoint = None
        if resume is True:
            checkpoint = read_newest(self._config.output_dir, self._peers)
        elif resume:
            checkpoint = read_checkpoint(Path(resume), self._peers)
        if checkpoint is not None:
            self._contents.restore(checkpoint, anyway=anyway)

    def check_writer(self) -> None:
        """See that no other process has taken over `output_dir`.

        Raises:
            TrainingError: in all processes: one has.
        """
        lease = self._lease
        if lease is not None:
            self._peers.together(lambda: lease.check() if self._peers.is_main else None)

    def save(self) -> None:
        """Everything the next update depends on, in `output_dir/checkpoint-<updates>`.

        With `async_save` it is copied now and written while the training goes on.

        Raises:
            TrainingError: in all processes: it cannot be written, or the one before could not.
        """
        # With save_strategy="no" a callback may still want one.
        lease = self._lease = self._lease or self._claim()
        folder = Path(self._config.output_dir) / f"checkpoint-{self._run.updates}"
        write = partial(
            save_checkpoint,
            folder,
            self._contents.part(),
            peers=self._writers,
            writer=f"{lease.token}",
            held=lease.held,
            keep=self._config.save_total_limit,
        )
        self._saver.save(write)

    def finish(self) -> None:
        """Return when the last checkpoint is in its place.

        Raises:
            TrainingError: in all processes: it could not be written.
        """
        self._saver.wait()

    def _refuse_earlier(self) -> None:
        earlier = latest_checkpoint(self._config.output_dir)
        if earlier is not None and self._config.save_strategy != "no":
            raise ConfigError(
                f"'{earlier}' is of an earlier run: this one's checkpoints would mix with it, and "
                "resuming would take the wrong one. Resume with resume_from_checkpoint, choose "
                "another output_dir, or remove the old checkpoints."
            )

    def _claim(self) -> Lease:
        claims: list[Any] = self._peers.together(
            lambda: self._claim_folder() if self._peers.is_main else None
        )
        lease: Lease = claims[0]
        return lease

    def _claim_folder(self) -> Lease:
        folder = Path(self._config.output_dir)
        try:
            return Lease.claim(folder)
        except OSError as error:
            raise ConfigError(
                f"output_dir='{folder}' cannot be made or written: {error}. No checkpoint could be "
                "written there. Choose another."
            ) from error
