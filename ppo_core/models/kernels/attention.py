"""Attention for the forward pass of `decoder_forward`.

Dimensions: H query heads, G key-value heads, E size of a head; others as in `algorithm.masking`.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppo_core.models.kernels.matmul_backend import small_matmuls

MAX_SCORES = 256 * 256
"""Largest number of scores (queries times keys) per head for which this file computes attention.
For longer sequences PyTorch's blockwise attention is faster."""

BLOCK = 64
"""Queries per block under a causal mask. A block's queries do not read the keys after the block."""


class Masking(Enum):
    """What a mask hides."""

    ANY = "any keys"
    CAUSAL = "exactly the keys after the query, see `causal_mask`"
    BRANCHED = "the keys after the query, and some earlier keys"


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Return a causal mask (1, S, S): -inf if the key follows the query, 0 otherwise."""
    return torch.full((length, length), -torch.inf, device=device).triu(1)[None]


def uses_own_attention(queries: int, keys: int, device: torch.device) -> bool:
    """Return whether `attend` computes attention itself for these numbers of queries and keys."""
    return device.type == "cpu" and queries * keys <= MAX_SCORES


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    masking: Masking = Masking.ANY,
) -> Tensor:
    """Return softmax(scale * queries @ keys.T + mask) @ values, (B, T, H * E).

    queries are (B, H, T, E), keys and values (B, G, S, E), and mask is (B or 1, T, S). `masking`
    must describe the mask. The mask may be None if PyTorch computes causal attention.
    """
    batch, heads, length, size = queries.shape
    # With a branched mask, PyTorch's attention would also compute the scores of all later keys.
    if masking is Masking.BRANCHED or uses_own_attention(length, keys.shape[2], queries.device):
        blocks = _blocks(length, keys.shape[2], masking)
        assert mask is not None
        inputs = queries, keys, values, mask, scale, blocks
        if torch.is_grad_enabled():
            output: Tensor = _OwnAttention.apply(*inputs)  # type: ignore[no-untyped-call]
        else:
            output = _attend(*inputs).output
    else:
        output = _library_attention(queries, keys, values, mask, scale)
    return output.transpose(1, 2).reshape(batch, length, heads * size)


def _library_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return PyTorch's attention (B, H, T, E); without a mask it is causal.

    On a GPU, PyTorch's blockwise kernels read shared key-value heads (G < H) only in half precision
    and without a mask. In other cases, PyTorch stores all scores, and copies the keys in fp32. To
    avoid this, queries or keys are rearranged so that G = H.
    """
    batch, heads, length, size = queries.shape
    added = None if mask is None else mask[:, None].to(queries.dtype)
    shares_keys = heads != keys.shape[1]
    if shares_keys and added is not None and length == 1:
        # Heads that read the same keys become one head, with one query of each.
        queries = queries[:, :, 0].unflatten(1, (keys.shape[1], -1))
    elif shares_keys and (added is not None or _is_fp32_on_gpu(queries)):
        keys, values = _repeated(keys, heads), _repeated(values, heads)
    output = torch.nn.functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=added,
        is_causal=added is None,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return output.reshape(batch, heads, length, size)


def _is_fp32_on_gpu(states: Tensor) -> bool:
    return states.device.type == "cuda" and states.dtype == torch.float32


def _repeated(states: Tensor, heads: int) -> Tensor:
    """Return (B, H, S, E): each head of (B, G, S, E) once for each query head that reads it."""
    each = heads // states.shape[1]
    return states[:, :, None].expand(-1, -1, each, -1, -1).flatten(1, 2)


class _Block(NamedTuple):
    """Queries that are computed in one matmul, and the keys that they may attend to."""

    queries: slice
    keys: slice
    masked: slice
    """Keys that the mask may hide from some queries of the block."""


def _blocks(queries: int, keys: int, masking: Masking) -> list[_Block]:
    if masking is Masking.ANY:
        return [_Block(slice(queries), slice(keys), slice(keys))]
    starts = range(0, queries, BLOCK)
    parts = [slice(start, min(start + BLOCK, queries)) for start in starts]
    if masking is Masking.CAUSAL:
        return [_Block(part, slice(part.stop), part) for part in parts]
    return [_Block(part, slice(part.stop), slice(part.stop)) for part in parts]


class _Attended(NamedTuple):
    """Output of attention, and tensors for its backward pass; N = B * G and R = H / G."""

    output: Tensor
    """(B, H, T, E)."""

    queries: Tensor
    """(N, R, T, E), scaled. The R heads that read the same keys form one matrix."""

    keys: Tensor
    """(N, S, E)."""

    values: Tensor
    """(N, S, E)."""

    weights: list[Tensor]
    """Attention weights (N, R * queries, keys) of each block."""


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    blocks: Sequence[_Block],
) -> _Attended:
    batch, heads, length, size = queries.shape
    queries = (queries * scale).view(batch * keys.shape[1], -1, length, size)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    outputs, all_weights = [], []
    with small_matmuls():
        for block in blocks:
            of_block = queries[:, :, block.queries].flatten(1, 2)
            scores = torch.bmm(of_block, keys[:, block.keys].transpose(1, 2))
            of_head = scores.view(batch, heads, -1, scores.shape[-1])
            of_head[..., block.masked].add_(mask[:, None, block.queries, block.masked])
            weights = torch.softmax(scores, dim=-1)
            output = torch.bmm(weights, values[:, block.keys])
            outputs.append(output.view(batch, heads, -1, size))
            all_weights.append(weights)
    return _Attended(torch.cat(outputs, dim=2), queries, keys, values, all_weights)


class _OwnAttention(torch.autograd.Function):
    """Attention that saves its weights for the backward pass."""

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
        made = _attend(queries, keys, values, mask, scale, blocks)
        ctx.save_for_backward(made.queries, made.keys, made.values, *made.weights)
        ctx.scale, ctx.blocks, ctx.groups = scale, blocks, keys.shape[1]
        return made.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *all_weights = ctx.saved_tensors
        shape = gradient.shape
        gradient = gradient.reshape(queries.shape)
        query_gradients = []
        key_gradients, value_gradients = torch.zeros_like(keys), torch.zeros_like(values)
        with small_matmuls():
            for block, weights in zip(ctx.blocks, all_weights, strict=True):
                of_block, output_gradients = (
                    part[:, :, block.queries].flatten(1, 2) for part in (queries, gradient)
                )
                weight_gradients = torch.bmm(
                    output_gradients, values[:, block.keys].transpose(1, 2)
                )
                score_gradients = torch.ops.aten._softmax_backward_data(
                    weight_gradients, weights, -1, weights.dtype
                )
                query_gradient = torch.bmm(score_gradients, keys[:, block.keys])
                query_gradients.append(query_gradient.unflatten(1, (queries.shape[1], -1)))
                key_gradients[:, block.keys] += torch.bmm(score_gradients.transpose(1, 2), of_block)
                value_gradients[:, block.keys] += torch.bmm(
                    weights.transpose(1, 2), output_gradients
                )
        by_group = (shape[0], ctx.groups, *keys.shape[1:])
        return (
            torch.cat(query_gradients, dim=2).mul_(ctx.scale).view(shape),
            key_gradients.view(by_group),
            value_gradients.view(by_group),
            None,
            None,
            None,
        )
