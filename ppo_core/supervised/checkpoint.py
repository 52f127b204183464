"""The contents of a checkpoint of supervised training: everything that the next step depends on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from torch import Tensor, nn

from ppo_core.checkpointing.folders import STATE
from ppo_core.checkpointing.read_checkpoint import Checkpoint
from ppo_core.checkpointing.training_state import TrainingState, explained_form, full_weights
from ppo_core.checkpointing.write_checkpoint import Part
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
    """Sums for the next line of the metrics file: losses, the module's metrics, and units (counted
    tokens or pairs)."""


@dataclass(frozen=True, kw_only=True)
class SupervisedContents:
    """Collects the state of one training, and restores it; all processes must call the methods."""

    training: TrainingState
    progress: Progress

    @property
    def step(self) -> int:
        """Number of optimizer steps that are done."""
        return self.progress.steps

    def part(self) -> Part:
        """Return a copy of the files that this process writes."""
        groups, documents, entries = self.training.part()
        weights = full_weights(self.training.engine, self._trained())
        if self.training.engine.is_main:
            groups[WEIGHTS] = weights
            own = {"step": self.step, "progress": asdict(self.progress)}
            documents[STATE] = json.dumps(entries | own)
        return Part(groups=groups, documents=documents)

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        named = self.training.engine.unwrap(self.training.module).named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def restore(self, checkpoint: Checkpoint, *, anyway: bool) -> None:
        """Continue from the state in a checkpoint.

        With `anyway`, accept a checkpoint of another run and log the differences as a warning.

        Raises:
            TrainingError: the checkpoint belongs to another run or has another model, or one of its
                files does not have the expected form.
        """
        training = self.training
        with explained_form(checkpoint):
            is_same = training.begin_restoring(checkpoint, anyway=anyway)
            training.engine.load_weights(training.module, self._weights(checkpoint).get)
            training.restore_optimizer(checkpoint, is_same=is_same)
            vars(self.progress).update(checkpoint.state["progress"])
            training.finish_restoring(checkpoint, "steps")

    def _weights(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        weights = checkpoint.tensors(WEIGHTS)
        if strange := weights.keys() ^ self._trained().keys():
            raise TrainingError(
                f"The model in the checkpoint '{checkpoint.folder}' has other parameters than in "
                f"this run, for example {min(strange)}. Resume with the model that the checkpoint "
                "was trained from."
            )
        return weights
