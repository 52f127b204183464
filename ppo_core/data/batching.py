"""Sequences of unequal lengths: padded to one tensor, and split into batches."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PASS_COST = 128
"""What a pass costs beside its tokens, in tokens: few small passes, or a few more fillers."""


def pad_rows(rows: Sequence[Sequence[int]], *, side: str = "right") -> tuple[Tensor, Tensor]:
    """Return lists of token ids as one zero-padded tensor (B, longest), and their lengths (B,).

    Padding is known by the lengths only, so 0 may also be a token.
    """
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    padded = torch.zeros(len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        padded[b, start : start + len(row)] = torch.as_tensor(row, dtype=torch.long)
    return padded, lengths


def length_sorted_batches(lengths: Tensor, batch_size: int) -> list[Tensor]:
    """Row numbers in batches of similar length, longest first.

    Padding costs little in such batches, and a batch that does not fit into memory fails at
    once. Rows of equal length keep their order.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    return list(order.split(batch_size))


def token_batches(lengths: Tensor, batch_size: int, *, most: int | None = None) -> list[Tensor]:
    """Row numbers in batches of similar length, longest first, cut so that passes cost least.

    A batch holds at most `most` tokens, fillers included, or else as many as `batch_size` of the
    longest rows; a row that is longer is a batch by itself. Rows of equal length keep their order.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    ordered = lengths[order].double().numpy(force=True)
    most = most or batch_size * int(ordered[0])
    rows = np.arange(1, len(ordered) + 1)
    # least[n] is what the first n rows cost at best, starts[n] where the last of their batches is.
    least, starts = np.zeros(len(ordered) + 1), [0]
    for n in rows:
        padded = ordered[:n] * (n - rows[:n] + 1)
        cost = least[:n] + padded + PASS_COST
        cost[:-1][padded[:-1] > most] = np.inf
        starts.append(int(cost.argmin()))
        least[n] = cost.min()
    cuts = [len(ordered)]
    while cuts[-1]:
        cuts.append(starts[cuts[-1]])
    return [order[start:end] for end, start in reversed(list(itertools.pairwise(cuts)))]
