"""Responses while they grow: which wait, which go on, and what they have so far."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.data.prompts import Tokens


class Waiting:
    """Prompts that are not yet read, in the order in which they will be."""

    def __init__(
        self, prompts: Sequence[Tokens], batch_size: int, pause: Callable[[], None]
    ) -> None:
        """Take them, and what is called once for each `batch_size` of them."""
        self._prompts = prompts
        self._batch_size = batch_size
        self._pause = pause
        self.begun = 0
        """How many have been taken."""

    def __len__(self) -> int:
        """How many are left."""
        return len(self._prompts) - self.begun

    def take(self, most: int) -> Sequence[Tokens]:
        """The next ones, with a pause where they are the first of a batch.

        So there are as many in all processes, which may wait for each other in it.
        """
        following = self._prompts[self.begun : self.begun + most]
        end = self.begun + len(following)
        if math.ceil(end / self._batch_size) > math.ceil(self.begun / self._batch_size):
            self._pause()
        self.begun = end
        return following


@dataclass(frozen=True)
class Growing:
    """The responses that grow, one at each row of the decoding."""

    number: Tensor
    """(b,) which of all responses it is."""

    place: Tensor
    """(b,) of its next token."""

    goes_on: Tensor
    """(b,) False where it has ended, and another may take its row."""

    @classmethod
    def new(cls, first: int, last: int, device: torch.device) -> "Growing":
        """Those of these numbers, before their first token."""
        number = torch.arange(first, last, device=device)
        return cls(number, torch.zeros_like(number), torch.ones_like(number, dtype=torch.bool))

    def after(self, ends: Tensor, most: int) -> "Growing":
        """A token later, which was the last of some."""
        place = self.place + 1
        return Growing(self.number, place, self.goes_on & ~ends & (place < most))

    def count(self, most: int) -> tuple[int, int]:
        """How many go on, and how many have all tokens that they may."""
        # Together, since each waits for the device.
        on, whole = torch.stack([self.goes_on.sum(), (self.place == most).sum()]).tolist()
        return on, whole

    def rows(self, *, at_least: int) -> Tensor:
        """The rows (b,) that go on, or so many others if there are none."""
        rows = self.goes_on.nonzero()[:, 0]
        return rows if len(rows) else rows.new_zeros(at_least)

    def at(self, rows: Tensor) -> "Growing":
        """Those at these rows (c,)."""
        return Growing(*(tensor[rows] for tensor in vars(self).values()))

    def and_then(self, others: "Growing") -> "Growing":
        """These, and others at the rows behind."""
        both = zip(vars(self).values(), vars(others).values(), strict=True)
        return Growing(*(torch.cat(pair) for pair in both))


@dataclass(frozen=True)
class Decoded:
    """Responses so far; columns as in `Rollout`."""

    ids: Tensor
    logprobs: Tensor
    behaviour_logprobs: Tensor
    lengths: Tensor
    has_stop: Tensor

    @classmethod
    def empty(cls, rows: int, most: int, device: torch.device) -> "Decoded":
        """Responses without a token; one that never ends has the full length."""
        return cls(
            ids=torch.zeros(rows, most, dtype=torch.long, device=device),
            logprobs=torch.zeros(rows, most, device=device),
            behaviour_logprobs=torch.zeros(rows, most, device=device),
            lengths=torch.full((rows,), most, device=device),
            has_stop=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def put(self, rows: Tensor, part: "Decoded") -> None:
        """Write the responses of some rows (b,)."""
        for whole, of_rows in zip(vars(self).values(), vars(part).values(), strict=True):
            whole[rows] = of_rows

    def write(
        self, growing: Growing, tokens: Tensor, logprobs: Tensor, behaviour: Tensor, stop: int
    ) -> Tensor:
        """Write the next token (b,) of each response that goes on; True where it is the stop.

        Nothing here waits for the device.
        """
        going, number, place = growing.goes_on, growing.number, growing.place
        self.ids[number, place] = torch.where(going, tokens, 0)
        self.logprobs[number, place] = torch.where(going, logprobs, 0)
        self.behaviour_logprobs[number, place] = torch.where(going, behaviour, 0)
        ends = going & (tokens == stop)
        self.lengths[number] = torch.where(ends, place + 1, self.lengths[number])
        self.has_stop[number] |= ends
        return ends
