"""Precision and temperature of logits."""

import torch
from torch import Tensor


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return the tensor in fp32 if it is in half precision, else unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return logits (..., V) divided by the temperature, in at least fp32.

    This is the only function that applies the temperature: the policy is
    softmax(tempered(logits)) in sampling, reference and update alike. Where no gradient is
    recorded, fp32 logits are divided in place, because they are often the largest tensor of a
    forward pass.
    """
    logits = at_least_fp32(logits)
    if temperature == 1:
        return logits
    return logits / temperature if logits.requires_grad else logits.div_(temperature)
