"""One forward pass through the decoders of `fast_path`: training, prefill and decoding.

Equal to those of transformers, and faster: sequences need no mask for their padding, attention is
one matmul for all heads, and the last layer is computed only at the positions that are read.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ppo_core.models.kernels.attention import attend, causal_mask
from ppo_core.models.kernels.decoder_families import DecoderLayer, DecoderLayers
from ppo_core.models.kernels.rotary import Angles, by_head


class Context(Protocol):
    """What the tokens (B, S) of a pass attend to."""

    positions: Tensor
    """(B or 1, S) of the tokens in their sequences."""

    mask: Tensor
    """(B or 1, S, keys), added to the attention scores."""

    is_causal: bool
    """Whether the mask is a `causal_mask`."""

    def update(
        self, layer: int, keys: Tensor, values: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor]:
        """Take the keys and values (B, S, G, E) of the tokens, not yet rotated.

        Returns all keys and values (B, G, keys, E) that the tokens attend to.
        """


class FullSequences:
    """Right-padded sequences (B, S) from their first position on; nothing is cached."""

    is_causal = True

    def __init__(self, ids: Tensor) -> None:
        """Take token ids (B, S)."""
        self.positions = torch.arange(ids.shape[1], device=ids.device)[None]
        self.mask = causal_mask(ids.shape[1], ids.device)

    def update(
        self, layer: int, keys: Tensor, values: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor]:
        """Return the rotated keys, and the values."""
        return by_head(keys, angles), by_head(values, None)


@dataclass(frozen=True)
class Selection:
    """N positions of sequences (B, S), sorted by sequence."""

    sequence: Tensor
    """(N,)"""

    position: Tensor
    """(N,)"""

    def by_sequence(self, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices (B, T) of the positions of each sequence, and the column (N,) of each."""
        sequence, device = self.sequence, self.sequence.device
        count = torch.bincount(sequence, minlength=num_sequences)
        column = torch.arange(len(sequence), device=device) - (count.cumsum(0) - count)[sequence]
        positions = torch.zeros(num_sequences, int(count.max()), dtype=torch.long, device=device)
        positions[sequence, column] = self.position
        sequences = torch.arange(num_sequences, device=device)[:, None].expand_as(positions)
        return sequences, positions, column


def states_at(decoder: DecoderLayers, ids: Tensor, sequence: Tensor, position: Tensor) -> Tensor:
    """Return last states (N, D) at some positions of right-padded token ids (B, S).

    `sequence` and `position` (N,) are sorted by sequence.
    """
    return forward(decoder, ids, FullSequences(ids), Selection(sequence, position))


def forward(
    decoder: DecoderLayers, ids: Tensor, context: Context, selected: Selection | None = None
) -> Tensor:
    """Return last states of token ids (B, S): (B, S, D), or (N, D) at the selected positions."""
    states = _embed(decoder, ids, context.positions)
    angles = _rotary_angles(decoder, states, context.positions)
    last = len(decoder.layers) - 1
    for number, layer in enumerate(decoder.layers):
        chosen = selected if number == last else None
        states = _layer_forward(layer, number, states, angles, context, chosen)
    return decoder.norm(states)


def _layer_forward(
    layer: DecoderLayer,
    number: int,
    states: Tensor,
    angles: Angles | None,
    context: Context,
    selected: Selection | None,
) -> Tensor:
    queries, keys, values = layer.project(layer.attention_norm(states))
    keys, values = context.update(number, keys, values, angles)
    if selected is None:
        queries = by_head(queries, angles)
        attended = attend(
            queries, keys, values, context.mask, layer.scale, is_causal=context.is_causal
        )
        return layer.finish(states, attended)
    sequences, positions, column = selected.by_sequence(len(states))
    if angles is not None:
        angles = Angles(*(angle[0, positions] for angle in angles))
    queries = by_head(queries[sequences, positions], angles)
    attended = attend(queries, keys, values, context.mask[0, positions], layer.scale)
    sequence, position = selected.sequence, selected.position
    return layer.finish(states[sequence, position], attended[sequence, column])


def _embed(decoder: DecoderLayers, ids: Tensor, positions: Tensor) -> Tensor:
    states: Tensor = decoder.token_embedding(ids)
    return (
        states
        if decoder.position_embedding is None
        else states + decoder.position_embedding(positions)
    )


def _rotary_angles(decoder: DecoderLayers, states: Tensor, positions: Tensor) -> Angles | None:
    """Return the rotary angles of positions (B or 1, S); None where positions have embeddings."""
    if decoder.rotary is None:
        return None
    # transformers repeats each angle, for the two halves that are rotated against each other.
    cos, sin = (twice[..., : twice.shape[-1] // 2] for twice in decoder.rotary(states, positions))
    return Angles(cos, sin)
