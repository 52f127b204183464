"""Sampling from the likeliest tokens alone."""

import torch
from torch import Tensor


def truncated(logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Tempered logits (B, V) with -inf for the tokens that are not to be drawn.

    First the top_k likeliest tokens stay (0: all of them), then of these the smallest set of the
    likeliest whose probability reaches top_p (1: all; arXiv:1904.09751, section 3.1), and never
    none. Of equal tokens the one with the lower id goes before the other. With nothing to cut,
    the very tensor that came in is returned.
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
