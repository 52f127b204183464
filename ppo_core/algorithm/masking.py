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

    A numeric mask contains the weight of each value.
    """
    if mask.dtype != torch.bool:
        values, mask = values * mask, mask != 0
    return torch.where(mask, values, 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the values where the mask is True, or 0 if the mask is all False.

    A numeric mask contains the weight of each value; the mean is 0 if all weights are 0.
    """
    total = mask.sum()
    return masked_sum(values, mask) / torch.where(total > 0, total, 1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Return the variance, with Bessel's correction, of the values where the mask is True.

    The variance of a single value is 0. A numeric mask contains the weight of each value; the
    weighted sum of squares is then divided by max(1, sum of the weights - 1).
    """
    deviations = values - masked_mean(values, mask)
    return masked_sum(deviations**2, mask) / (mask.sum() - 1).clamp(min=1)
