"""Continuous batching: prompts that wait, responses that grow, and what has been sampled."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.data.prompts import Tokens


class PromptQueue:
    """Prompts that have not been read yet, in their order."""

    def __init__(
        self, prompts: Sequence[Tokens], batch_size: int, before_batch: Callable[[], None]
    ) -> None:
        """Take prompts, and a function to call once for each `batch_size` of them."""
        self._prompts = prompts
        self._batch_size = batch_size
        self._before_batch = before_batch
        self.num_taken = 0

    def __len__(self) -> int:
        """Return how many prompts are left."""
        return len(self._prompts) - self.num_taken

    def take(self, most: int) -> Sequence[Tokens]:
        """Return up to `most` further prompts; calls `before_batch` if they begin a batch.

        The number of calls depends on the number of prompts alone, so it is equal in all processes,
        which may wait for each other in that function.
        """
        prompts = self._prompts[self.num_taken : self.num_taken + most]
        end = self.num_taken + len(prompts)
        if math.ceil(end / self._batch_size) > math.ceil(self.num_taken / self._batch_size):
            self._before_batch()
        self.num_taken = end
        return prompts


@dataclass(frozen=True)
class ActiveSequences:
    """The response of each sequence (b,) of the decoder."""

    response: Tensor
    """(b,) number of the response among all responses."""

    position: Tensor
    """(b,) of its next token."""

    is_active: Tensor
    """(b,) False if it has finished; another response may then take the place of the sequence."""

    @classmethod
    def new(cls, first: int, end: int, device: torch.device) -> "ActiveSequences":
        """Return responses first..end-1, without a token."""
        response = torch.arange(first, end, device=device)
        is_active = torch.ones_like(response, dtype=torch.bool)
        return cls(response, torch.zeros_like(response), is_active)

    def advance(self, is_stop: Tensor, max_new_tokens: int) -> "ActiveSequences":
        """Advance by one token; `is_stop` (b,) marks the responses that it finishes."""
        position = self.position + 1
        is_active = self.is_active & ~is_stop & (position < max_new_tokens)
        return ActiveSequences(self.response, position, is_active)

    def count(self, max_new_tokens: int) -> tuple[int, int]:
        """Return how many responses are active, and how many sequences have all their tokens."""
        # Stacked, since each transfer waits for the device.
        active, full = torch.stack(
            [self.is_active.sum(), (self.position == max_new_tokens).sum()]
        ).tolist()
        return active, full

    def active_sequences(self, *, at_least: int) -> Tensor:
        """Return the sequences (c,) with an active response.

        If there are none, return sequence 0, `at_least` times.
        """
        sequences = self.is_active.nonzero()[:, 0]
        return sequences if len(sequences) else sequences.new_zeros(at_least)

    def select(self, sequences: Tensor) -> "ActiveSequences":
        """Return the responses of some sequences (c,)."""
        return ActiveSequences(*(tensor[sequences] for tensor in vars(self).values()))

    def extend(self, others: "ActiveSequences") -> "ActiveSequences":
        """Concatenate along the batch."""
        both = zip(vars(self).values(), vars(others).values(), strict=True)
        return ActiveSequences(*(torch.cat(pair) for pair in both))


@dataclass(frozen=True)
class ResponseBuffer:
    """Responses sampled so far; tensors as in `Rollout`."""

    ids: Tensor
    logprobs: Tensor
    behaviour_logprobs: Tensor
    lengths: Tensor
    has_stop: Tensor

    @classmethod
    def empty(
        cls, num_responses: int, max_new_tokens: int, device: torch.device
    ) -> "ResponseBuffer":
        """Return responses without a token; their lengths are those without a stop token."""
        shape = num_responses, max_new_tokens
        return cls(
            ids=torch.zeros(shape, dtype=torch.long, device=device),
            logprobs=torch.zeros(shape, device=device),
            behaviour_logprobs=torch.zeros(shape, device=device),
            lengths=torch.full((num_responses,), max_new_tokens, device=device),
            has_stop=torch.zeros(num_responses, dtype=torch.bool, device=device),
        )

    def put(self, responses: Tensor, part: "ResponseBuffer") -> None:
        """Write some responses (b,)."""
        for full, of_part in zip(vars(self).values(), vars(part).values(), strict=True):
            full[responses] = of_part

    def write(
        self,
        active: ActiveSequences,
        tokens: Tensor,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        stop_token_id: int,
    ) -> Tensor:
        """Write the next token (b,) of each active response; returns where it is the stop token.

        Does not wait for the device.
        """
        is_active, response, position = active.is_active, active.response, active.position
        self.ids[response, position] = torch.where(is_active, tokens, 0)
        self.logprobs[response, position] = torch.where(is_active, logprobs, 0)
        self.behaviour_logprobs[response, position] = torch.where(is_active, behaviour_logprobs, 0)
        is_stop = is_active & (tokens == stop_token_id)
        self.lengths[response] = torch.where(is_stop, position + 1, self.lengths[response])
        self.has_stop[response] |= is_stop
        return is_stop
