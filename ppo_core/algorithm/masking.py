"""Masks, and statistics of masked values.

Dimensions throughout `ppo_core`: B responses, P prompt tokens, T response tokens, S = P + T tokens
of prompt and response, N counted tokens, D hidden size, V vocabulary size. A response token is
counted unless the policy did not sample it (padding, or the output of a tool).
"""

import torch
from torch import Tensor


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Return a mask (B, width) that is True at the first `lengths[b]` positions."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the values where the mask is True; the other values may be NaN.

    A mask of numbers holds the weight of each value.
    """
    if mask.dtype != torch.bool:
        values, mask = values * mask, mask != 0
    return torch.where(mask, values, 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the values where the mask is True, or 0 if the mask is all False.

    A mask of numbers holds the weight of each value; the mean is 0 if all weights are 0.
    """
    total = mask.sum()
    return masked_sum(values, mask) / torch.where(total > 0, total, 1)


def standardize(values: Tensor, mask: Tensor, *, keep_mean: bool, epsilon: float = 1e-8) -> Tensor:
    """Return values (B, T) scaled to standard deviation 1 where the mask is True, 0 elsewhere.

        out = (values - mean) / sqrt(variance + epsilon)  [+ mean, if keep_mean]

    Mean and variance (with Bessel's correction) are taken where the mask is True. Advantages use
    keep_mean=False and rewards keep_mean=True (arXiv:1909.08593; arXiv:2403.17031, detail 18).
    """
    mean = masked_mean(values, mask)
    deviations = torch.where(mask, values - mean, 0)
    variance = (deviations**2).sum() / (mask.sum() - 1).clamp(min=1)
    scaled = deviations * torch.rsqrt(variance + epsilon)
    return torch.where(mask, scaled + mean, 0) if keep_mean else scaled
