"""The fraction of repeated n-grams in a response."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


def repeated_share(ids: Tensor, lengths: Tensor, n: int = 3) -> Tensor:
    """Return the fraction (B,) of repeated n-grams of each response, on the device of `ids`.

    ids are (B, T) token ids. lengths is (B,): response b is the first lengths[b] tokens of row b.
    """
    shares = [
        repeated_ngrams(response[:length], n)
        for response, length in zip(ids.tolist(), lengths.tolist(), strict=True)
    ]
    return torch.tensor(shares, device=ids.device)


def most_frequent_share(ids: Tensor, lengths: Tensor) -> Tensor:
    """Return the fraction (B,) of each response's tokens that equal its most frequent token.

    ids are (B, T) token ids. lengths is (B,): response b is the first lengths[b] tokens of row b.
    """
    shares = [
        max(Counter(response[:length]).values(), default=0) / max(1, length)
        for response, length in zip(ids.tolist(), lengths.tolist(), strict=True)
    ]
    return torch.tensor(shares, device=ids.device)


def repeated_ngrams(tokens: Sequence[int] | Sequence[str], n: int) -> float:
    """Return the fraction of n-grams that occurred earlier in the sequence.

        (number of n-grams - number of distinct n-grams) / number of n-grams

    This is seq-rep-n of arXiv:1908.04319. Sequences of at most n tokens give 0.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return (len(grams) - len(set(grams))) / max(1, len(grams))
