"""Precision and temperature of logits."""

import torch
from torch import Tensor


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in fp32, and any other tensor unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return logits (..., V) divided by the temperature, in at least fp32.

    This is the only function that applies the temperature: sampling, update and reference all use
    softmax(tempered(logits)). Without a gradient, fp32 logits are divided in place, because logits
    are often the largest tensor of a forward pass.
    """
    logits = at_least_fp32(logits)
    if temperature == 1:
        return logits
    return logits / temperature if logits.requires_grad else logits.div_(temperature)
