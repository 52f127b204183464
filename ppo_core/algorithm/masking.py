"""Masks, and statistics of masked values.

Dimensions throughout `ppo_core`: B responses, P prompt tokens, T response tokens, S = P + T tokens
of prompt and response, N counted tokens, D hidden size, V vocabulary size. A response token is
counted if the policy sampled it. Padding and the output of tools are not counted.
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


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Return the variance, with Bessel's correction, of the values where the mask is True.

    A mask of numbers holds the weight of each value.
    """
    deviations = values - masked_mean(values, mask)
    return masked_sum(deviations**2, mask) / (mask.sum() - 1).clamp(min=1)


def masked_whiten(
    values: Tensor, mask: Tensor, *, keep_mean: bool = False, epsilon: float = 1e-8
) -> Tensor:
    """Return values (B, T) scaled to standard deviation 1 where the mask is True, 0 elsewhere.

        out = (values - mean) / sqrt(variance + epsilon)  [+ mean, if keep_mean]

    Mean and variance are `masked_mean` and `masked_var`. Advantages use keep_mean=False and rewards
    keep_mean=True (arXiv:1909.08593; arXiv:2403.17031, detail 18).
    """
    mean = masked_mean(values, mask)
    scaled = (values - mean) * torch.rsqrt(masked_var(values, mask) + epsilon)
    return torch.where(mask != 0, scaled + mean if keep_mean else scaled, 0)


def whiten(values: Tensor) -> Tensor:
    """Return `masked_whiten` of the values with a mask that is True everywhere."""
    return masked_whiten(values, torch.ones_like(values, dtype=torch.bool))
