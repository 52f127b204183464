"""Forward passes of our own through the decoders of `plain_layers`.

Equal to those of transformers, and faster: rows need no mask for their fillers, attention is one
product for all heads, and the last layer is computed where its states are read alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ppo_core.attention import attend, causal_mask
from ppo_core.batches import token_batches
from ppo_core.plain_layers import Layer, Layers
from ppo_core.prompts import Tokens
from ppo_core.rotary import Turn, by_head, write_by_head
from ppo_core.tensors import length_mask, pad_rows


def states_at(parts: Layers, ids: Tensor, row: Tensor, place: Tensor) -> Tensor:
    """States (N, D) at chosen places of token ids (B, S), filled up on the right.

    `row` and `place` (N,) say where, row by row.
    """
    reading = _Reading(parts, ids)
    for layer in parts.layers[:-1]:
        reading.pass_through(layer, *reading.heads(layer))
    last = parts.layers[-1]
    return reading.finish(last, *reading.heads(last), row, place)


class _Reading:
    """Rows of tokens on their way through the layers."""

    def __init__(self, parts: Layers, ids: Tensor) -> None:
        """Take token ids (B, S), filled up on the right."""
        self._parts = parts
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        self._mask = causal_mask(ids.shape[1], ids.device)
        self._states = _embed(parts, ids, places)
        self._turn = _turn_of(parts, self._states, places)

    def heads(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, S, H, E), keys and values (B, G, S, E) of all places."""
        queries, keys, values = layer.project(layer.attention_norm(self._states))
        return queries, by_head(keys, self._turn), by_head(values, None)

    def pass_through(self, layer: Layer, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Bring the states of all places behind a layer."""
        turned = by_head(queries, self._turn)
        mixed = attend(turned, keys, values, self._mask, layer.scale, is_causal=True)
        self._states = layer.finish(self._states, mixed)

    def finish(
        self,
        layer: Layer,
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


def _embed(parts: Layers, ids: Tensor, places: Tensor) -> Tensor:
    states: Tensor = parts.tokens(ids)
    return states if parts.places is None else states + parts.places(places)


def _turn_of(parts: Layers, states: Tensor, places: Tensor) -> Turn | None:
    if parts.rotary is None:
        return None
    # Each angle is there twice, for the halves that are turned against each other.
    cos, sin = (whole[..., : whole.shape[-1] // 2] for whole in parts.rotary(states, places))
    return Turn(cos, sin)


class PlainDecoding:
    """Responses that grow by a token a pass, with the keys and values of what is before.

    A prompt stands in the first columns of its row of the memory. Behind the longest prompt, the
    next tokens of all responses stand in the same column.
    """

    states: Tensor
    """(B, D) behind the last token of each row."""

    def __init__(
        self,
        parts: Layers,
        prompts: Sequence[Tokens],
        room: int,
        *,
        within: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
    ) -> None:
        """Read the prompts, with room for so many more tokens of each; all inside `within()`."""
        self._parts = parts
        self._within = within
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._next_place = lengths
        self._filled = int(lengths.max())
        self._width = self._filled + room
        hidden = ~length_mask(lengths, self._filled)
        self._mask = torch.zeros(len(prompts), 1, self._width, device=device)
        self._mask[:, 0, : self._filled].masked_fill_(hidden, -torch.inf)
        self._memory: list[tuple[Tensor, Tensor]] = []
        batches = token_batches(lengths.cpu(), len(prompts))
        with within():
            read = [
                self._read([prompts[n] for n in rows.tolist()], rows.to(device)) for rows in batches
            ]
        self.states = torch.cat(read)[torch.cat(batches).argsort().to(device)]

    def _read(self, prompts: Sequence[Tokens], rows: Tensor) -> Tensor:
        """States (b, D) behind some prompts, those of `rows` (b,)."""
        ids, lengths = (tensor.to(rows.device) for tensor in pad_rows(prompts))
        reading = _Reading(self._parts, ids)
        first = torch.arange(len(ids), device=ids.device)
        *before, last = self._parts.layers
        for number, layer in enumerate(before):
            queries, keys, values = reading.heads(layer)
            self._keep_all(number, rows, keys, values)
            reading.pass_through(layer, queries, keys, values)
        queries, keys, values = reading.heads(last)
        self._keep_all(len(before), rows, keys, values)
        return reading.finish(last, queries, keys, values, first, lengths - 1)

    def _keep_all(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        if len(self._memory) == layer:
            _, heads, _, size = keys.shape
            shape = len(self._mask), heads, self._width, size
            # What is hidden by the mask must be a number all the same.
            self._memory.append((keys.new_zeros(shape), values.new_zeros(shape)))
        for memory, new in zip(self._memory[layer], (keys, values), strict=True):
            memory[rows, :, : new.shape[2]] = new

    def step(self, tokens: Tensor) -> None:
        """Read the next token (B,) of each row."""
        with self._within():
            self.states = self._step(tokens[:, None], self._next_place[:, None])[:, 0]
        self._filled, self._next_place = self._filled + 1, self._next_place + 1

    def _step(self, ids: Tensor, places: Tensor) -> Tensor:
        states = _embed(self._parts, ids, places)
        turn = _turn_of(self._parts, states, places)
        column, filled = self._filled, self._filled + 1
        mask = self._mask[:, :, :filled]
        for layer, (keys, values) in zip(self._parts.layers, self._memory, strict=True):
            queries, key, value = layer.project(layer.attention_norm(states))
            write_by_head(key, turn, keys[:, :, column:filled])
            write_by_head(value, None, values[:, :, column:filled])
            seen = keys[:, :, :filled], values[:, :, :filled]
            states = layer.finish(states, attend(by_head(queries, turn), *seen, mask, layer.scale))
        return self._parts.norm(states)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows (b,) alone, moved together; the memory stays reserved."""
        self._mask, self._next_place = self._mask[rows], self._next_place[rows]
        for number, parts in enumerate(self._memory):
            for part in parts:
                part[: len(rows), :, : self._filled] = part[rows, :, : self._filled]
            self._memory[number] = parts[0][: len(rows)], parts[1][: len(rows)]
