"""Pad sequences of unequal lengths, and split them into batches."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PASS_COST = 128
"""Fixed cost of a forward pass, in tokens; a larger value gives fewer batches and more padding."""

GPU_PASS_COST = 1024
"""`PASS_COST` on a GPU: launching the kernels of a pass takes as long as computing this many
tokens."""


def pad_rows(rows: Sequence[Sequence[int]], *, side: str = "right") -> tuple[Tensor, Tensor]:
    """Return lists of token ids as one zero-padded tensor (B, longest), and the lengths (B,).

    Only the lengths mark padding, because 0 may also be a token id.
    """
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    padded = torch.zeros(len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        padded[b, start : start + len(row)] = torch.as_tensor(row, dtype=torch.long)
    return padded, lengths


def length_sorted_batches(lengths: Tensor, batch_size: int) -> list[Tensor]:
    """Return indices of sequences in batches of similar length, longest first.

    Similar lengths need little padding. The longest batch comes first, so that a run with too
    little memory fails at once. Sequences of equal length keep their order.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    return list(order.split(batch_size))


def token_batches(
    lengths: Tensor,
    batch_size: int,
    *,
    max_tokens: int | None = None,
    device: torch.device | None = None,
    processes: int = 1,
) -> list[Tensor]:
    """Return indices of sequences in batches of similar length, longest first, at minimum cost.

    The cost of a batch is its tokens, padding included, plus the fixed cost of a pass on `device`
    (by default, the device of `lengths`). Dynamic programming finds the split with the lowest total
    cost. A batch has at most `max_tokens` tokens, padding included, or is a single longer sequence.
    If `max_tokens` is None, a batch has at most the tokens of `batch_size` sequences of the
    greatest length. Sequences of equal length keep their order.

    If several `processes` split each batch evenly, cost and tokens are counted for the process with
    the most sequences.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    ordered = lengths[order].double().numpy(force=True)
    max_tokens = max_tokens or batch_size * int(ordered[0])
    pass_cost = GPU_PASS_COST if (device or lengths.device).type == "cuda" else PASS_COST
    numbers = np.arange(1, len(ordered) + 1)
    # least[n] is the lowest cost of the first n sequences, and starts[n] is where the last batch of
    # this split begins.
    least, starts = np.zeros(len(ordered) + 1), [0]
    for n in numbers:
        padded = ordered[:n] * np.ceil((n - numbers[:n] + 1) / processes)
        cost = least[:n] + padded + pass_cost
        cost[:-1][padded[:-1] > max_tokens] = np.inf
        starts.append(int(cost.argmin()))
        least[n] = cost.min()
    cuts = [len(ordered)]
    while cuts[-1]:
        cuts.append(starts[cuts[-1]])
    return [order[start:end] for end, start in reversed(list(itertools.pairwise(cuts)))]


def scoring_batches(lengths: Tensor, batch_size: int, *, equal_passes: bool) -> list[Tensor]:
    """Return indices of sequences in batches of similar length, longest first.

    Without `equal_passes`, the number of batches depends on the lengths (`token_batches`). With
    `equal_passes`, the number of batches depends only on the number of sequences
    (`length_sorted_batches`), so processes with equally many sequences run equally many passes.
    """
    split = length_sorted_batches if equal_passes else token_batches
    return split(lengths, batch_size)
