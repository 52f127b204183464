"""Standardize values, such as advantages, over the counted tokens of a batch."""

import torch
from torch import Tensor

from ppo_core.algorithm.masking import masked_mean, masked_var


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
