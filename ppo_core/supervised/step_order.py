"""The rows of each optimizer step of supervised training, and each process's share of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from ppo_core.supervised.supervised_config import SupervisedConfig


@dataclass(frozen=True)
class StepOrder:
    """The order of the rows, which depends on the seed and not on the number of processes."""

    lengths: Sequence[int]
    """Number of tokens of each row."""

    rows_per_step: int
    epochs: int
    seed: int

    @classmethod
    def of(cls, lengths: Sequence[int], config: SupervisedConfig) -> "StepOrder":
        """Return the order of a training."""
        rows = config.batch_size * config.gradient_accumulation_steps
        return cls(lengths, rows, config.num_epochs, config.seed)

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps of one pass over the rows."""
        return math.ceil(len(self.lengths) / self.rows_per_step)

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the training."""
        return self.epochs * self.steps_per_epoch

    @property
    def rows(self) -> int:
        """Number of rows of all steps."""
        return self.epochs * len(self.lengths)

    def rows_of_steps(self, steps: int) -> int:
        """Return the number of rows in the first `steps` steps."""
        epochs, further = divmod(steps, self.steps_per_epoch)
        return epochs * len(self.lengths) + further * self.rows_per_step

    def epoch(self, number: int) -> list[list[int]]:
        """Return the rows of each step of an epoch; in a step, the longest row is first.

        Epochs are counted from 0. Rows of similar length share a step, because they need less
        padding.
        """
        generator = torch.Generator().manual_seed(self.seed + number)
        order = get_length_grouped_indices(self.lengths, self.rows_per_step, generator=generator)
        return [
            sorted(order[start : start + self.rows_per_step], key=self._by_length)
            for start in range(0, len(order), self.rows_per_step)
        ]

    def _by_length(self, row: int) -> tuple[int, int]:
        return -self.lengths[row], row
