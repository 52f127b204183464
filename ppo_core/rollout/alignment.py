"""Align sequences of different lengths that are decoded together."""

import torch
from torch import Tensor


class AlignedSequences:
    """Columns of sequences that end in the same column, so that their next tokens share one.

    A sequence of n tokens has the columns `end - n` to `end - 1`, its first token at position 0.
    """

    def __init__(self, longest_prompt: int, max_new_tokens: int, device: torch.device) -> None:
        """Begin without a sequence. No prompt may be longer than `longest_prompt`."""
        self.lengths = torch.zeros(0, dtype=torch.long, device=device)
        """(B,) tokens of each sequence."""
        self.longest = 0
        """Tokens of the longest sequence."""
        self.end = self._longest_prompt = longest_prompt
        self.width = longest_prompt + max_new_tokens
        """Columns of all sequences."""
        self._align()

    @property
    def first(self) -> int:
        """The first column that any sequence has."""
        return self.end - self.longest

    def add(self, lengths: Tensor) -> None:
        """Append prompts of these lengths (b,), a tensor on the CPU."""
        self.longest = max(self.longest, int(lengths.max()))
        self.lengths = torch.cat([self.lengths, lengths.to(self.lengths.device)])
        self._align()

    def advance(self) -> None:
        """Count the token that each sequence was given."""
        self.lengths = self.lengths + 1
        self.longest, self.end = self.longest + 1, self.end + 1

    def _select(self, kept: Tensor) -> None:
        self.lengths = self.lengths[kept]
        self.longest = int(self.lengths.max()) if len(kept) else 0

    def _align(self) -> None:
        starts = (self.end - self.lengths)[:, None, None]
        before = torch.arange(self.width, device=starts.device) < starts
        self.mask = torch.zeros(before.shape, device=starts.device).masked_fill_(before, -torch.inf)
        """(B, 1, columns): -inf before the first token of a sequence, else 0."""
