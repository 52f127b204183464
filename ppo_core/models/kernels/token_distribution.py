"""Next-token distributions of logits: log-probabilities of chosen tokens, and entropies."""

from dataclasses import dataclass

import torch
from torch import Tensor

LOGITS_PER_BLOCK = 2**20
"""Logits of a softmax that fit into a processor's cache: 4 MiB in fp32."""


@dataclass(frozen=True)
class Distribution:
    """Next-token distributions at n positions, and log-probabilities of the chosen tokens."""

    probabilities: Tensor
    """(n, V)."""

    logprobs: Tensor
    """(n,) log-probabilities of the chosen tokens."""

    entropies: Tensor
    """(n,)."""


def distribution(logits: Tensor, chosen: Tensor) -> Distribution:
    """Return the distributions of tempered logits (n, V) for chosen token ids (n,).

    `logits` are overwritten by the probabilities, in blocks that fit into the cache. logsumexp is
    recovered from the maxima: max p = exp(max z - logsumexp(z)).
    """
    size = max(1, LOGITS_PER_BLOCK // logits.shape[1])
    logprobs, entropies = [], []
    for z, ids in zip(logits.split(size), chosen.split(size), strict=True):
        p = torch.softmax(z, dim=-1)
        logsumexp = z.amax(dim=-1) - p.amax(dim=-1).log()
        logprobs.append(z.gather(1, ids[:, None])[:, 0] - logsumexp)
        entropies.append(logsumexp - torch.linalg.vecdot(z, p))
        z.copy_(p)
    return Distribution(logits, torch.cat(logprobs), torch.cat(entropies))
