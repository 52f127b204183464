"""Forward pass of the decoders that `fast_path` supports, for training, prefill and decoding.

The hidden states equal transformers' hidden states up to rounding. The pass takes less time: it
needs no padding mask; on a CPU, query heads that read the same keys share a matmul; and the last
layer is computed only at the positions to be read (for its attention see `_all_attend`).
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ppo_core.models.kernels.attention import Masking, attend, causal_mask, uses_own_attention
from ppo_core.models.kernels.decoder_families import DecoderLayer, DecoderLayers
from ppo_core.models.kernels.rotary import Angles, by_head


class Context(Protocol):
    """The keys and values that the tokens (B, S) of a forward pass attend to."""

    positions: Tensor
    """(B or 1, S) position of each token in its sequence."""

    masking: Masking
    """What the mask hides."""

    @property
    def mask(self) -> Tensor | None:
        """(B or 1, S, keys), -inf or 0, added to the attention scores.

        None if `masking` is CAUSAL and PyTorch computes the attention, which then needs no mask.
        """

    def update(
        self, layer: int, keys: Tensor, values: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate the tokens' keys; store keys and values (B, S, G, E) in the cache, if any.

        Returns all keys and values (B, G, keys, E) that the tokens attend to in this layer.
        """


class FullSequences:
    """Right-padded sequences (B, S), read in one pass without a cache."""

    masking = Masking.CAUSAL
    mask: Tensor | None = None

    def __init__(self, ids: Tensor) -> None:
        """Take token ids (B, S)."""
        length = ids.shape[1]
        self.positions = torch.arange(length, device=ids.device)[None]
        if uses_own_attention(length, length, ids.device):
            self.mask = causal_mask(length, ids.device)

    def update(
        self, layer: int, keys: Tensor, values: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, both (B, G, S, E)."""
        return by_head(keys, angles), by_head(values, None)


class BranchedPairs(FullSequences):
    """Pairs of sequences with a common start, which is computed only once.

    A pair becomes one row: the first sequence, and then the second without the common start.

        common | rest of the first | rest of the second

    The rest of the second does not attend to the rest of the first, and the positions of both rests
    follow the positions of the common start. So a row has the same hidden states as the two
    sequences. `ids` (B, R) are the token ids of the rows.
    """

    masking = Masking.BRANCHED

    def __init__(self, pairs: Tensor, lengths: Tensor) -> None:
        """Take right-padded token ids (B, 2, S), and the lengths (B, 2), at least 1."""
        first = lengths[:, :1]
        alike = (pairs[:, 0] == pairs[:, 1]).long().cumprod(dim=1).sum(dim=1, keepdim=True)
        # Each rest has at least the sequence's last token, whose state `last_states` reads there.
        common = torch.minimum(alike, lengths.amin(dim=1, keepdim=True) - 1)
        self.lengths = lengths.sum(dim=1) - common[:, 0]
        column = torch.arange(int(self.lengths.max()), device=pairs.device)
        is_second = column >= first
        # Only padding at the end of a row can exceed this maximum.
        after = (column - first + common).clamp(max=pairs.shape[2] - 1)
        self.positions = torch.where(is_second, after, column)
        row = torch.arange(len(pairs), device=pairs.device)[:, None]
        self.ids = pairs[row, is_second.long(), self.positions]
        is_first_rest = (column >= common) & ~is_second
        hidden = is_second[:, :, None] & is_first_rest[:, None, :]
        self.mask = causal_mask(len(column), pairs.device).masked_fill(hidden, -torch.inf)


@dataclass(frozen=True)
class Selection:
    """N positions of sequences (B, S), sorted by sequence."""

    sequence: Tensor
    """(N,)"""

    position: Tensor
    """(N,)"""

    def by_sequence(self, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """Arrange the N positions as a matrix (B, T), padded with position 0.

        Returns the sequence (B, T) and position (B, T) of each entry, and the column (N,) of each
        selected position.
        """
        sequence, device = self.sequence, self.sequence.device
        # `bincount` would make the host wait for the device once more.
        count = torch.zeros(num_sequences, dtype=torch.long, device=device)
        count.index_add_(0, sequence, torch.ones_like(sequence))
        column = torch.arange(len(sequence), device=device) - (count.cumsum(0) - count)[sequence]
        positions = torch.zeros(num_sequences, int(count.max()), dtype=torch.long, device=device)
        positions[sequence, column] = self.position
        sequences = torch.arange(num_sequences, device=device)[:, None].expand_as(positions)
        return sequences, positions, column


def states_at(decoder: DecoderLayers, ids: Tensor, sequence: Tensor, position: Tensor) -> Tensor:
    """Return last hidden states (N, D) at some positions of right-padded token ids (B, S).

    `sequence` and `position` (N,) are sorted by sequence.
    """
    return forward(decoder, ids, FullSequences(ids), Selection(sequence, position))


def last_states(decoder: DecoderLayers, pairs: Tensor, lengths: Tensor) -> Tensor:
    """Return hidden states (2B, D) at the last tokens of right-padded pairs (B, 2, S)."""
    context = BranchedPairs(pairs, lengths)
    row = torch.arange(len(pairs), device=pairs.device).repeat_interleave(2)
    last = torch.stack([lengths[:, 0], context.lengths], dim=1).flatten() - 1
    return forward(decoder, context.ids, context, Selection(row, last))


def forward(
    decoder: DecoderLayers, ids: Tensor, context: Context, selected: Selection | None = None
) -> Tensor:
    """Return last hidden states (B, S, D) of token ids (B, S), or (N, D) at selected positions."""
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
    if selected is None or _all_attend(context, selected, states):
        queries = by_head(queries, angles)
        attended = attend(queries, keys, values, context.mask, layer.scale, context.masking)
        if selected is None:
            return layer.finish(states, attended)
        column = selected.position
    else:
        sequences, positions, column = selected.by_sequence(len(states))
        if angles is not None:
            angles = Angles(*(_at(angle, sequences, positions) for angle in angles))
        queries = by_head(queries[sequences, positions], angles)
        mask = _mask_at(context, sequences, positions)
        attended = attend(queries, keys, values, mask, layer.scale)
    sequence, position = selected.sequence, selected.position
    return layer.finish(states[sequence, position], attended[sequence, column])


def _all_attend(context: Context, selected: Selection, states: Tensor) -> bool:
    """Return whether the last layer computes attention at all positions, and then selects.

    For several queries in long sequences, PyTorch's causal attention needs less memory than
    PyTorch's attention with a mask.
    """
    batch, length, _ = states.shape
    queries = math.ceil(len(selected.sequence) / batch)
    needs_mask = uses_own_attention(queries, length, states.device)
    return context.masking is Masking.CAUSAL and queries > 1 and not needs_mask


def _mask_at(context: Context, sequences: Tensor, positions: Tensor) -> Tensor:
    """Return the mask (B, T, keys) of the queries at some positions, both (B, T)."""
    if context.mask is not None:
        return _at(context.mask, sequences, positions)
    is_later = context.positions > positions[..., None]
    return torch.zeros(is_later.shape, device=positions.device).masked_fill_(is_later, -torch.inf)


def _at(values: Tensor, sequences: Tensor, positions: Tensor) -> Tensor:
    """Return `values` (B or 1, S, ...) at some positions of the sequences, both (B, T)."""
    return values.expand(len(sequences), *values.shape[1:])[sequences, positions]


def _embed(decoder: DecoderLayers, ids: Tensor, positions: Tensor) -> Tensor:
    states: Tensor = decoder.token_embedding(ids)
    return (
        states
        if decoder.position_embedding is None
        else states + decoder.position_embedding(positions)
    )


def _rotary_angles(decoder: DecoderLayers, states: Tensor, positions: Tensor) -> Angles | None:
    """Return the rotary angles of positions (B or 1, S), or None if the model uses none."""
    if decoder.rotary is None:
        return None
    # In transformers' angles, the second half repeats the first half.
    cos, sin = (twice[..., : twice.shape[-1] // 2] for twice in decoder.rotary(states, positions))
    return Angles(cos, sin)
