"""Top-k and top-p truncation of next-token distributions."""

import torch
from torch import Tensor


def truncated(logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Return tempered logits (B, V) with -inf for tokens outside the top-k and top-p sets.

    First, the top_k likeliest tokens are kept; top_k=0 keeps all. Their probabilities are
    renormalized. Then the smallest set of likeliest tokens whose total probability reaches top_p
    is kept (arXiv:1904.09751, section 3.1). This set has at least one token; top_p=1 keeps all.
    Among equal logits, lower token ids are kept first. With top_k=0 and top_p=1, the input tensor
    itself is returned.
    """
    if top_k == 0 and top_p == 1:
        return logits
    ordered, tokens = logits.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    if top_k > 0:
        ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    if top_p < 1:
        likelier = ordered.softmax(dim=1).cumsum(dim=1)[:, :-1]
        kept = 1 + (likelier < top_p).sum(dim=1, keepdim=True)
        ordered = ordered.masked_fill(rank >= kept, -torch.inf)
    return torch.empty_like(logits).scatter_(1, tokens, ordered)
