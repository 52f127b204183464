"""Rotary embeddings, for the forward passes of `plain_decoder`.

Legend beside that of `tensors`: H heads, E size of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Turn(NamedTuple):
    """Cosine and sine of a rotary embedding: (B or 1, S, R / 2) each, for R numbers of a head."""

    cos: Tensor
    sin: Tensor


def by_head(states: Tensor, turn: Turn | None) -> Tensor:
    """States (B, S, H, E) as (B, H, S, E) in one block, turned by their places.

    The first half of the R numbers is turned against the second (RoFormer, arXiv:2104.09864, in
    the order of GPT-NeoX and Llama).
    """
    if turn is None:
        return states.transpose(1, 2).contiguous()
    if torch.is_grad_enabled():
        turned: Tensor = _Turned.apply(states, *turn)  # type: ignore[no-untyped-call]
        return turned
    rows, places, heads, size = states.shape
    out = states.new_empty(rows, heads, places, size)
    write_by_head(states, turn, out)
    return out


def write_by_head(states: Tensor, turn: Turn | None, out: Tensor) -> None:
    """The same into room (B, H, S, E) that is there; no gradient flows."""
    if turn is None:
        out.copy_(states.transpose(1, 2))
    else:
        _turn(states, *turn, out=out.transpose(1, 2))


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return by_head(states, Turn(cos, sin))  # no gradient is recorded in here

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        rows, heads, places, size = gradient.shape
        back = gradient.new_empty(rows, places, heads, size)
        _turn(gradient.transpose(1, 2), cos, -sin, out=back)
        return back, None, None


def _turn(states: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> None:
    """Turn states (B, S, H, E) by the angles of their places; `out` has the same shape."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    half = cos.shape[-1]
    first, second, rest = states.tensor_split((half, 2 * half), dim=-1)
    to_first, to_second, to_rest = out.tensor_split((half, 2 * half), dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    to_rest.copy_(rest)
