"""Forward passes of our own through the decoders of `plain_layers`.

Equal to those of transformers, and faster: rows need no mask for their fillers, attention is one
product for all heads, and the last layer is computed where its states are read alone.
"""

import torch
from torch import Tensor

from ppo_core.models.kernels.attention import attend, causal_mask
from ppo_core.models.kernels.decoder_families import DecoderLayer, DecoderLayers
from ppo_core.models.kernels.rotary import Turn, by_head


def states_at(parts: DecoderLayers, ids: Tensor, row: Tensor, place: Tensor) -> Tensor:
    """States (N, D) at chosen places of token ids (B, S), filled up on the right.

    `row` and `place` (N,) say where, row by row.
    """
    reading = Reading(parts, ids)
    for layer in parts.layers[:-1]:
        reading.pass_through(layer, *reading.heads(layer))
    last = parts.layers[-1]
    return reading.finish(last, *reading.heads(last), row, place)


class Reading:
    """Rows of tokens on their way through the layers."""

    def __init__(self, parts: DecoderLayers, ids: Tensor) -> None:
        """Take token ids (B, S), filled up on the right."""
        self._parts = parts
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        self._mask = causal_mask(ids.shape[1], ids.device)
        self._states = embed(parts, ids, places)
        self._turn = turn_of(parts, self._states, places)

    def heads(self, layer: DecoderLayer) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, S, H, E), keys and values (B, G, S, E) of all places."""
        queries, keys, values = layer.project(layer.attention_norm(self._states))
        return queries, by_head(keys, self._turn), by_head(values, None)

    def pass_through(
        self, layer: DecoderLayer, queries: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Bring the states of all places behind a layer."""
        turned = by_head(queries, self._turn)
        mixed = attend(turned, keys, values, self._mask, layer.scale, is_causal=True)
        self._states = layer.finish(self._states, mixed)

    def finish(
        self,
        layer: DecoderLayer,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        row: Tensor,
        place: Tensor,
    ) -> Tensor:
        """States (N, D) behind the last layer; nothing reads those of other places."""
        rows, places, nth = _by_row(row, place, len(self._states))
        turn = self._turn and Turn(*(angle[0, places] for angle in self._turn))
        chosen = by_head(queries[rows, places], turn)
        mixed = attend(chosen, keys, values, self._mask[0, places], layer.scale)
        states = layer.finish(self._states[row, place], mixed[row, nth])
        return self._parts.norm(states)


def _by_row(row: Tensor, place: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices (B, T) of the chosen places of each row, and which of them each of the N is."""
    count = torch.bincount(row, minlength=num_rows)
    nth = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    places = torch.zeros(num_rows, int(count.max()), dtype=torch.long, device=row.device)
    places[row, nth] = place
    rows = torch.arange(num_rows, device=row.device)[:, None].expand_as(places)
    return rows, places, nth


def embed(parts: DecoderLayers, ids: Tensor, places: Tensor) -> Tensor:
    """Embeddings (B, S, D) of token ids (B, S) at places (B or 1, S)."""
    states: Tensor = parts.token_embedding(ids)
    return states if parts.position_embedding is None else states + parts.position_embedding(places)


def turn_of(parts: DecoderLayers, states: Tensor, places: Tensor) -> Turn | None:
    """How heads are turned at places (B or 1, S); None where embeddings say the place."""
    if parts.rotary is None:
        return None
    # Each angle is there twice, for the halves that are turned against each other.
    cos, sin = (whole[..., : whole.shape[-1] // 2] for whole in parts.rotary(states, places))
    return Turn(cos, sin)
