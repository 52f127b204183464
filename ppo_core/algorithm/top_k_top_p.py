"""Top-k and top-p truncation of next-token distributions."""

import torch
from torch import Tensor


def truncated(logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Return tempered logits (B, V) with -inf for tokens outside the top-k and top-p sets.

    Keeps the top_k likeliest tokens (0: all), then among them the smallest set of likeliest tokens
    whose probability reaches top_p (1: all; arXiv:1904.09751, section 3.1), at least one token.
    Ties are broken in favor of the lower token id. Returns the input tensor itself if
    nothing is truncated.
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
    return torch.empty_like(logits).scatter(1, tokens, ordered)
