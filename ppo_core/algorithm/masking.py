"""Masks, masked statistics and log-probabilities of tokens.

Legend, here and everywhere: B responses, P prompt tokens, T response tokens, S = P + T
tokens of a joined row, N counted tokens, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """True for the first `lengths[b]` of `width` places: (B,) -> (B, width)."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of the values where the mask holds; what the mask hides may even be NaN."""
    return torch.where(mask, values, 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values where the mask holds; 0 where it never holds."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def standardize(values: Tensor, mask: Tensor, *, keep_mean: bool, epsilon: float = 1e-8) -> Tensor:
    """Values (B, T) scaled to standard deviation 1 under the mask, and 0 outside of it.

        out = (values - mean) / sqrt(variance + epsilon)  [+ mean, if keep_mean]

    Mean and variance (with Bessel's correction) are those of the counted tokens. Advantages
    lose their mean, rewards keep it (arXiv:1909.08593; arXiv:2403.17031, detail 18).
    """
    mean = masked_mean(values, mask)
    deviations = torch.where(mask, values - mean, 0)
    variance = (deviations**2).sum() / (mask.sum() - 1).clamp(min=1)
    scaled = deviations * torch.rsqrt(variance + epsilon)
    return torch.where(mask, scaled + mean, 0) if keep_mean else scaled
