"""Attention of our own, for the forward passes of `plain_decoder`.

Legend beside that of `tensors`: H heads of queries, G of keys and values, E size of a head.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppo_core.models.kernels.matmul_backend import small_matmuls

MOST_PAIRS = 256 * 256
"""Queries times keys up to which all weights of a row are held at once: for longer rows the
blocks of PyTorch's own attention are faster (at 400 x 400 on a CPU by a quarter)."""

BLOCK = 64
"""Queries of whole rows at a time. They are not multiplied by keys that follow the block: at 8 x 8
heads of 117 x 32 forward and backward pass take 0.8 of the time, at 149 0.7."""


def causal_mask(rows: int, device: torch.device) -> Tensor:
    """What is added to the scores (1, S, S) of rows without a gap: -inf where a key follows."""
    return torch.full((rows, rows), -torch.inf, device=device).triu(1)[None]


def is_own(queries: int, keys: int, device: torch.device) -> bool:
    """Whether so many queries and keys a row are left to the attention of this file."""
    return device.type == "cpu" and queries * keys <= MOST_PAIRS


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Weighted values (B, T, H * E) for queries (B, H, T, E), keys and values (B, G, S, E).

    mask (B or 1, T, S) is added to the scores, which are the products times `scale`. `is_causal`
    says that it is the `causal_mask` of whole rows.
    """
    rows, heads, length, size = queries.shape
    if is_own(length, keys.shape[2], queries.device):
        blocks = _blocks(length, keys.shape[2], is_causal=is_causal)
        inputs = queries, keys, values, mask, scale, blocks
        if torch.is_grad_enabled():
            mixed: Tensor = _OwnAttention.apply(*inputs)  # type: ignore[no-untyped-call]
        else:
            mixed = _mix(*inputs).mixed
    else:
        mixed = torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if is_causal else mask[:, None].to(queries.dtype),
            is_causal=is_causal,
            scale=scale,
            enable_gqa=heads != keys.shape[1],
        )
    return mixed.transpose(1, 2).reshape(rows, length, heads * size)


class _Block(NamedTuple):
    """Queries that are multiplied together, and what of the keys they are multiplied by."""

    queries: slice
    keys: slice
    masked: slice
    """Keys that the mask may hide from some of them."""


def _blocks(queries: int, keys: int, *, is_causal: bool) -> list[_Block]:
    if not is_causal:
        return [_Block(slice(queries), slice(keys), slice(keys))]
    starts = range(0, queries, BLOCK)
    parts = [slice(start, min(start + BLOCK, queries)) for start in starts]
    return [_Block(part, slice(part.stop), part) for part in parts]


class _Mixed(NamedTuple):
    """What attention makes, and what it is made of: N = B * G matrices of R = H / G heads each."""

    mixed: Tensor
    """(B, H, T, E)."""

    queries: Tensor
    """(N, R, T, E), scaled. All heads that read the same keys are one matrix."""

    keys: Tensor
    values: Tensor
    """(N, S, E) both."""

    weights: list[Tensor]
    """Of each block."""


def _mix(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    blocks: Sequence[_Block],
) -> _Mixed:
    rows, heads, length, size = queries.shape
    queries = (queries * scale).view(rows * keys.shape[1], -1, length, size)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    parts, kept = [], []
    with small_matmuls():
        for block in blocks:
            asked = queries[:, :, block.queries].flatten(1, 2)
            scores = torch.bmm(asked, keys[:, block.keys].transpose(1, 2))
            of_query = scores.view(rows, heads, -1, scores.shape[-1])
            of_query[..., block.masked].add_(mask[:, None, block.queries, block.masked])
            weights = torch.softmax(scores, dim=-1)
            parts.append(torch.bmm(weights, values[:, block.keys]).view(rows, heads, -1, size))
            kept.append(weights)
    return _Mixed(torch.cat(parts, dim=2), queries, keys, values, kept)


class _OwnAttention(torch.autograd.Function):
    """Attention that keeps the weights of all queries for its backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        scale: float,
        blocks: Sequence[_Block],
    ) -> Tensor:
        made = _mix(queries, keys, values, mask, scale, blocks)
        ctx.save_for_backward(made.queries, made.keys, made.values, *made.weights)
        ctx.scale, ctx.blocks, ctx.groups = scale, blocks, keys.shape[1]
        return made.mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *kept = ctx.saved_tensors
        shape = gradient.shape
        gradient = gradient.reshape(queries.shape)
        of_queries = []
        of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
        with small_matmuls():
            for block, weights in zip(ctx.blocks, kept, strict=True):
                asked, pulled = (
                    of[:, :, block.queries].flatten(1, 2) for of in (queries, gradient)
                )
                of_weights = torch.bmm(pulled, values[:, block.keys].transpose(1, 2))
                of_scores = torch.ops.aten._softmax_backward_data(
                    of_weights, weights, -1, weights.dtype
                )
                product = torch.bmm(of_scores, keys[:, block.keys])
                of_queries.append(product.unflatten(1, (queries.shape[1], -1)))
                of_keys[:, block.keys] += torch.bmm(of_scores.transpose(1, 2), asked)
                of_values[:, block.keys] += torch.bmm(weights.transpose(1, 2), pulled)
        by_group = (shape[0], ctx.groups, *keys.shape[1:])
        return (
            torch.cat(of_queries, dim=2).mul_(ctx.scale).view(shape),
            of_keys.view(by_group),
            of_values.view(by_group),
            None,
            None,
            None,
        )
