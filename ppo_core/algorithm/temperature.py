"""Precision and temperature of logits."""

import torch
from torch import Tensor


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Cast a tensor of lower precision to fp32; return an fp32 or fp64 tensor unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return logits (..., V) divided by the temperature, in at least fp32.

    Sampling, update and reference all use softmax(tempered(logits)), so the temperature is the same
    everywhere. `fused_linear_loss` may divide the hidden states instead, which gives equal logits.
    Logits in fp32 or fp64 that need no gradient are overwritten, because logits are often the
    largest tensor of a forward pass.
    """
    logits = at_least_fp32(logits)
    if temperature == 1:
        return logits
    return logits / temperature if logits.requires_grad else logits.div_(temperature)
