"""State of continuous batching: waiting prompts and active sequences."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.data.prompts import Tokens


class PromptQueue:
    """Prompts that wait to be read by the decoder, in a fixed order."""

    def __init__(
        self,
        prompts: Sequence[Tokens],
        batch_size: int,
        before_batch: Callable[[], None],
        *,
        taken_before: int = 0,
    ) -> None:
        """Take prompts, and a function that is called once per `batch_size` prompts.

        `taken_before` is the number of prompts that were taken from earlier queues.
        """
        self._prompts = prompts
        self._batch_size = batch_size
        self._before_batch = before_batch
        self._taken_before = taken_before
        self.num_taken = 0

    def __len__(self) -> int:
        """Return the number of prompts that have not been taken."""
        return len(self._prompts) - self.num_taken

    def take(self, limit: int) -> Sequence[Tokens]:
        """Take up to `limit` prompts; call `before_batch` if one of them is the first of a batch.

        `before_batch` may wait for other processes, so all processes must call it equally often.
        Therefore, the number of calls depends only on the number of prompts.
        """
        prompts = self._prompts[self.num_taken : self.num_taken + limit]
        end = self.num_taken + len(prompts)
        before, after = (self._taken_before + taken for taken in (self.num_taken, end))
        if math.ceil(after / self._batch_size) > math.ceil(before / self._batch_size):
            self._before_batch()
        self.num_taken = end
        return prompts


@dataclass(frozen=True)
class ActiveSequences:
    """The response that is sampled in each of the decoder's b sequences."""

    response: Tensor
    """(b,) row of the response in the `ResponseBuffer`."""

    position: Tensor
    """(b,) position of the response's next token."""

    is_active: Tensor
    """(b,) False if the response has finished; its sequence can then be dropped."""

    @classmethod
    def new(cls, first: int, end: int, device: torch.device) -> "ActiveSequences":
        """Return active sequences for the responses `first` to `end - 1`, which have no tokens."""
        response = torch.arange(first, end, device=device)
        is_active = torch.ones_like(response, dtype=torch.bool)
        return cls(response, torch.zeros_like(response), is_active)

    def advance(self, is_stop: Tensor, max_new_tokens: int) -> "ActiveSequences":
        """Advance by one token, which is the stop token where `is_stop` (b,) is True."""
        position = self.position + 1
        is_active = self.is_active & ~is_stop & (position < max_new_tokens)
        return ActiveSequences(self.response, position, is_active)

    def count(self, max_new_tokens: int) -> tuple[int, int]:
        """Return the number of active responses and the number of responses of maximum length."""
        # Stacked into one transfer, because each transfer to the CPU waits for the device.
        active, full = torch.stack(
            [self.is_active.sum(), (self.position == max_new_tokens).sum()]
        ).tolist()
        return active, full

    def active_sequences(self, *, at_least: int) -> Tensor:
        """Return the indices (c,) of sequences with an active response.

        If no response is active, return index 0, repeated `at_least` times.
        """
        sequences = self.is_active.nonzero()[:, 0]
        return sequences if len(sequences) else sequences.new_zeros(at_least)

    def select(self, sequences: Tensor) -> "ActiveSequences":
        """Return only the sequences with the given indices (c,)."""
        return ActiveSequences(*(tensor[sequences] for tensor in vars(self).values()))

    def extend(self, others: "ActiveSequences") -> "ActiveSequences":
        """Append other sequences."""
        both = zip(vars(self).values(), vars(others).values(), strict=True)
        return ActiveSequences(*(torch.cat(pair) for pair in both))
