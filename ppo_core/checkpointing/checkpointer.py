"""Write the checkpoints of a run between its steps, and resume from them bit for bit."""

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
    """Writes and restores the checkpoints of one run; all processes call, each writes a part."""

    def __init__(self, contents: CheckpointContents) -> None:
        """Keep the contents; nothing is written yet."""
        self._contents = contents
        self._config, self._run = contents.config, contents.run
        self._peers = self._writers = ProcessGroup()
        self._lease: Lease | None = None
        self._saver = AsyncWriter(in_background=self._config.async_save)

    def start(self, resume: str | Path | bool | None, *, anyway: bool = False) -> None:
        """Acquire the lease of `output_dir`, and restore a checkpoint if `resume` asks for one.

        Args:
            resume: the folder of a checkpoint, or True for the newest undamaged one, if there is
                any.
            anyway: accept a checkpoint of another run; log the differences as a warning.

        Raises:
            ConfigError: `output_dir` cannot be created, or holds checkpoints of an earlier run
                while `resume` is off.
            TrainingError: the checkpoint is damaged, or belongs to another run.
        """
        if not resume and self._run.updates:
            return  # the same trainer continues
        patience = self._config.ddp_timeout
        self._peers = ProcessGroup.meet(patience)
        # A thread that writes must not mix its messages with the training's.
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
        """Raise if another process has acquired the lease of `output_dir`.

        Raises:
            TrainingError: in all processes: another process has.
        """
        lease = self._lease
        if lease is not None:
            self._peers.together(lambda: lease.check() if self._peers.is_main else None)

    def save(self) -> None:
        """Write everything that the next update depends on to `output_dir/checkpoint-<updates>`.

        With `async_save` the contents are copied now and written while training continues.

        Raises:
            TrainingError: in all processes: this checkpoint, or the previous one under
                `async_save`, could not be written.
        """
        # With save_strategy="no" a callback can still ask for a checkpoint.
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
        """Return when the last checkpoint is complete.

        Raises:
            TrainingError: in all processes: it could not be written.
        """
        self._saver.wait()

    def _refuse_earlier(self) -> None:
        earlier = latest_checkpoint(self._config.output_dir)
        if earlier is not None and self._config.save_strategy != "no":
            raise ConfigError(
                f"'{earlier}' is of an earlier run: the checkpoints of both would mix, and "
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
                f"output_dir='{folder}' cannot be created or written: {error}. No checkpoint "
                "could be saved there. Choose another folder."
            ) from error
