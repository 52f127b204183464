"""Attention of our own, for the forward passes of `plain_decoder`.

Legend beside that of `tensors`: H heads of queries, G of keys and values, E size of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST_PAIRS = 256 * 256
"""Queries times keys up to which all weights of a row are held at once: for longer rows the
blocks of PyTorch's own attention are faster (at 400 x 400 on a CPU by a quarter)."""


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


def causal_mask(rows: int, device: torch.device) -> Tensor:
    """What is added to the scores (1, S, S) of rows without a gap: -inf where a key follows."""
    return torch.full((rows, rows), -torch.inf, device=device).triu(1)[None]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Weighted values (B, T, H * E) for queries (B, H, T, E), keys and values (B, G, S, E).

    mask (B or 1, T, S) is added to the scores, which are the products times `scale`.
    """
    rows, heads, length, size = queries.shape
    if queries.device.type == "cpu" and length * keys.shape[2] <= MOST_PAIRS:
        if torch.is_grad_enabled():
            mixed: Tensor = _WholeWeights.apply(  # type: ignore[no-untyped-call]
                queries, keys, values, mask, scale
            )
        else:
            mixed = _mix(queries, keys, values, mask, scale)[0]
    else:
        mixed = torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask[:, None].to(queries.dtype),
            scale=scale,
            enable_gqa=heads != keys.shape[1],
        )
    return mixed.transpose(1, 2).reshape(rows, length, heads * size)


class _WholeWeights(torch.autograd.Function):
    """Attention that keeps the weights of all queries for its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        mixed, *used = _mix(queries, keys, values, mask, scale)
        ctx.save_for_backward(*used)
        ctx.scale = scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, weights = ctx.saved_tensors
        rows, heads, length, size = gradient.shape
        gradient = gradient.reshape(len(keys), -1, size)
        with _small_products():
            of_values = torch.bmm(weights.transpose(1, 2), gradient)
            of_weights = torch.bmm(gradient, values.transpose(1, 2))
            of_scores = torch.ops.aten._softmax_backward_data(
                of_weights, weights, -1, weights.dtype
            )
            of_queries = torch.bmm(of_scores, keys).mul_(ctx.scale)
            of_keys = torch.bmm(of_scores.transpose(1, 2), queries)
        of_pairs = (of.view(rows, -1, keys.shape[1], size) for of in (of_keys, of_values))
        return of_queries.view(rows, heads, length, size), *of_pairs, None, None


def _mix(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weighted values (B, H, T, E), and what they were made of: a matrix for each row and group.

    The queries of all heads that read the same keys are one matrix; they are scaled.
    """
    rows, heads, length, size = queries.shape
    groups, places = keys.shape[1:3]
    queries = (queries * scale).view(rows * groups, -1, size)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    with _small_products():
        scores = torch.bmm(queries, keys.transpose(1, 2))
        scores.view(rows, heads, length, places).add_(mask[:, None])
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.bmm(weights, values)
    return mixed.view(rows, heads, length, size), queries, keys, values, weights


@contextmanager
def _small_products() -> Iterator[None]:
    """Where oneDNN was chosen for fp32 ("medium"), MKL inside: it is faster at many small ones."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)
