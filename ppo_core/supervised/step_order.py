"""The rows of each optimizer step of supervised training, and each process's share of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from ppo_core.data.batching import token_batches
from ppo_core.supervised.supervised_config import SupervisedConfig

TOKENS_ON_CPU = 1024
"""Maximum number of tokens in one pass of one process on a CPU.

Larger passes need more memory, and are faster only if weights or gradients are sharded. If a row
has more tokens, the maximum is the number of tokens of this row."""


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
        return cls(lengths, config.rows_per_step, config.num_epochs, config.seed)

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


def passes_of_step(
    tokens: Sequence[int], batch_size: int, *, device: torch.device, processes: int
) -> list[list[int]]:
    """Split the rows of a step into passes of all processes; return the row indices of each pass.

    `tokens` has the number of tokens of each row. In a pass, a process has at most the tokens of
    `batch_size` rows of the greatest length, and on a CPU at most `TOKENS_ON_CPU`.
    """
    longest = max(tokens)
    most = batch_size * longest
    if device.type == "cpu":
        most = min(most, max(TOKENS_ON_CPU, longest))
    parts = token_batches(
        torch.tensor(tokens), batch_size, max_tokens=most, device=device, processes=processes
    )
    return [part.tolist() for part in parts]
