"""Align sequences of different lengths that are decoded together."""

import torch
from torch import Tensor


class AlignedSequences:
    """Columns of sequences that all end in the same column, so their next tokens share a column.

    A sequence of n tokens is in the columns `end - n` to `end - 1`. Its first token has position 0.
    """

    def __init__(self, longest_prompt: int, max_new_tokens: int, device: torch.device) -> None:
        """Start without sequences. No prompt may be longer than `longest_prompt`."""
        self.lengths = torch.zeros(0, dtype=torch.long, device=device)
        """(B,) number of tokens of each sequence."""
        self.longest = 0
        """Number of tokens of the longest sequence."""
        self.end = self._longest_prompt = longest_prompt
        self.width = longest_prompt + max_new_tokens
        """Number of columns."""
        self._align()

    @property
    def first(self) -> int:
        """First column of the longest sequence."""
        return self.end - self.longest

    def add(self, lengths: Tensor) -> None:
        """Append prompts of these lengths (b,), a tensor on the CPU."""
        self.longest = max(self.longest, int(lengths.max()))
        self.lengths = torch.cat([self.lengths, lengths.to(self.lengths.device)])
        self._align()

    def advance(self) -> None:
        """Count one more token in each sequence."""
        self.lengths = self.lengths + 1
        self.longest, self.end = self.longest + 1, self.end + 1

    def _select(self, kept: Tensor) -> None:
        self.lengths = self.lengths[kept]
        self.longest = int(self.lengths.max()) if len(kept) else 0

    def _align(self) -> None:
        starts = (self.end - self.lengths)[:, None, None]
        before = torch.arange(self.width, device=starts.device) < starts
        self.mask = torch.zeros(before.shape, device=starts.device).masked_fill_(before, -torch.inf)
        """(B, 1, columns): -inf before the first token of a sequence, otherwise 0."""
