"""The contents of a checkpoint of supervised training: everything that the next step depends on."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ppo_core.checkpointing.files import STATE, Checkpoint, Part
from ppo_core.checkpointing.fingerprint import Fingerprint
from ppo_core.checkpointing.optimizer_options import optimizer_options
from ppo_core.checkpointing.training_state import (
    begin_restoring,
    explained_form,
    full_weights,
    log_resumed,
    optimizer_part,
    random_part,
    restore_optimizer,
    restore_random_part,
    restore_schedule,
)
from ppo_core.distributed.engine import Engine
from ppo_core.errors import TrainingError

WEIGHTS = "weights"
"""Name of the group of tensors with the trained weights."""


@dataclass(kw_only=True)
class Progress:
    """How far a training has come."""

    steps: int = 0
    """Optimizer steps that are done."""

    tail: float = 0.0
    """Sum of the losses of the steps in the last tenth of the training."""

    line: list[float] = field(default_factory=list)
    """Sums for the next line of the metrics file: losses, the module's metrics, and units."""


@dataclass(frozen=True, kw_only=True)
class SupervisedContents:
    """Collects the state of one training, and restores it; all processes must call."""

    engine: Engine
    module: nn.Module
    """The module, as the engine prepared it."""

    optimizer: Optimizer
    scheduler: LRScheduler
    fingerprint: Fingerprint
    progress: Progress

    @property
    def step(self) -> int:
        """Number of optimizer steps that are done."""
        return self.progress.steps

    def part(self) -> Part:
        """Return a copy of the files that this process writes."""
        groups, documents = random_part(self.engine)
        optimizer, kept = optimizer_part(self.engine, self.module, self.optimizer)
        weights = full_weights(self.engine, self._trained())
        groups |= optimizer
        if self.engine.is_main:
            groups[WEIGHTS] = weights
            documents[STATE] = json.dumps(self._state(kept))
        return Part(groups=groups, documents=documents)

    def _state(self, kept: dict[str, list[str]]) -> dict[str, Any]:
        return {
            "step": self.step,
            "processes": self.engine.num_processes,
            "identity": self.fingerprint.as_json(),
            "optimizer": optimizer_options(self.optimizer),
            "kept": kept,
            "scheduler": self.scheduler.state_dict(),
            "progress": asdict(self.progress),
        }

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained: all of them, or those of an adapter."""
        named = self.engine.unwrap(self.module).named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def restore(self, checkpoint: Checkpoint, *, anyway: bool) -> None:
        """Continue from the state in a checkpoint.

        With `anyway`, accept a checkpoint of another run and log the differences as a warning.

        Raises:
            TrainingError: the checkpoint belongs to another run, has another model, or a file of it
                has another form.
        """
        with explained_form(checkpoint):
            self._restore(checkpoint, anyway=anyway)

    def _restore(self, checkpoint: Checkpoint, *, anyway: bool) -> None:
        engine, module, optimizer = self.engine, self.module, self.optimizer
        is_same = begin_restoring(
            checkpoint, self.fingerprint, engine, module, optimizer, anyway=anyway
        )
        weights = checkpoint.tensors(WEIGHTS)
        if strange := weights.keys() ^ self._trained().keys():
            raise TrainingError(
                f"The model in the checkpoint '{checkpoint.folder}' has other parameters than in "
                f"this run, for example {min(strange)}. Resume with the model that the checkpoint "
                "was trained from."
            )
        engine.load_weights(module, weights.get)
        restore_optimizer(checkpoint, engine, module, optimizer)
        restore_schedule(checkpoint, optimizer, self.scheduler, is_same=is_same)
        vars(self.progress).update(checkpoint.state["progress"])
        restore_random_part(checkpoint, engine)
        log_resumed(checkpoint, engine, "steps")
