"""How much of a response is repetition."""

import torch
from torch import Tensor


def repeated_share(ids: Tensor, lengths: Tensor, n: int = 3) -> Tensor:
    """Share of each response's n-grams that occurred before in the same response.

        (number of n-grams - number of different n-grams) / number of n-grams

    ids are (B, T) token ids, of which the first lengths[b] (B,) are counted. Returns (B,) on the
    device of ids; a response of fewer than n + 1 tokens has 0. It is the seq-rep-n of
    arXiv:1908.04319.
    """
    shares = [
        _share(row[:length], n) for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)
    ]
    return torch.tensor(shares, device=ids.device)


def _share(tokens: list[int], n: int) -> float:
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return (len(grams) - len(set(grams))) / max(1, len(grams))
