"""Rotary embeddings (RoFormer, arXiv:2104.09864).

The first R of a head's E entries are rotated. As in GPT-NeoX and Llama, the entries i and i + R / 2
are rotated as a pair. H is the number of heads; other dimensions are as in `algorithm.masking`.
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
    """Return states (B, S, H, E) as contiguous (B, H, S, E), rotated if angles are given."""
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
    """Write states (B, S, H, E) into `out` (B, H, S, E), rotated if angles are given.

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
        return by_head(states, Angles(cos, sin))  # gradients are disabled here

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        batch, heads, length, size = gradient.shape
        rotated_back = gradient.new_empty(batch, length, heads, size)
        _rotate(gradient.transpose(1, 2), cos, -sin, out=rotated_back)
        return rotated_back, None, None


def _rotate(states: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> None:
    """Rotate states (B, S, H, E) by the angles of their positions, and write them into `out`."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    half = cos.shape[-1]
    first, second, rest = states.tensor_split((half, 2 * half), dim=-1)
    to_first, to_second, to_rest = out.tensor_split((half, 2 * half), dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    to_rest.copy_(rest)
