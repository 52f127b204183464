"""Rotary embeddings (RoFormer, arXiv:2104.09864).

R numbers of a head are rotated, the first half of them against the second, in the order of GPT-NeoX
and Llama. Legend beside that of `masking`: H heads, E size of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Angles(NamedTuple):
    """Cosine and sine (B or 1, S, R / 2) of the rotary angles of positions."""

    cos: Tensor
    sin: Tensor


def by_head(states: Tensor, angles: Angles | None) -> Tensor:
    """Return states (B, S, H, E) as contiguous (B, H, S, E), rotated if there are angles."""
    if angles is None:
        return states.transpose(1, 2).contiguous()
    if torch.is_grad_enabled():
        rotated: Tensor = _Rotated.apply(states, *angles)  # type: ignore[no-untyped-call]
        return rotated
    batch, length, heads, size = states.shape
    out = states.new_empty(batch, heads, length, size)
    write_by_head(states, angles, out)
    return out


def write_by_head(states: Tensor, angles: Angles | None, out: Tensor) -> None:
    """Write states (B, S, H, E) into `out` (B, H, S, E), rotated if there are angles.

    No gradient is recorded.
    """
    if angles is None:
        out.copy_(states.transpose(1, 2))
    else:
        _rotate(states, *angles, out=out.transpose(1, 2))


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return by_head(states, Angles(cos, sin))  # gradients are disabled in here

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        batch, heads, length, size = gradient.shape
        rotated_back = gradient.new_empty(batch, length, heads, size)
        _rotate(gradient.transpose(1, 2), cos, -sin, out=rotated_back)
        return rotated_back, None, None


def _rotate(states: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> None:
    """Write states (B, S, H, E), rotated by the angles of their positions, into `out`."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    half = cos.shape[-1]
    first, second, rest = states.tensor_split((half, 2 * half), dim=-1)
    to_first, to_second, to_rest = out.tensor_split((half, 2 * half), dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    to_rest.copy_(rest)
