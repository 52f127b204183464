"""Decoding by the forward passes of `plain_decoder`, in memory that is reserved once."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.batching import pad_rows, token_batches
from ppo_core.data.prompts import Tokens
from ppo_core.models.kernels.attention import attend
from ppo_core.models.kernels.decoder_families import DecoderLayers
from ppo_core.models.kernels.decoder_forward import Reading, embed, turn_of
from ppo_core.models.kernels.rotary import by_head, write_by_head


class PlainDecoding:
    """Responses that grow by a token a pass, with the keys and values of what is before.

    Rows are aligned on the right: the next tokens of all stand in the same column of the memory,
    whenever they began, and a row sees nothing of the columns before its first token. A row that
    has as many tokens as there is room for is left out by `keep` before the next step.
    """

    states: Tensor
    """(B, D) behind the last token of each row."""

    def __init__(
        self,
        parts: DecoderLayers,
        prompts: Sequence[Tokens],
        room: int,
        *,
        within: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
    ) -> None:
        """Read the prompts, with room for so many more tokens of each; all inside `within()`."""
        self._parts = parts
        self._within = within
        self._most_rows = len(prompts)
        self._longest = max(map(len, prompts))
        self._width = self._longest + room
        self._memory: list[tuple[Tensor, Tensor]] = []
        self._filled = self._longest
        self._lengths = torch.zeros(0, dtype=torch.long, device=device)
        self._read_all(prompts)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows (b,) alone, moved together; the memory stays reserved."""
        self.states, self._lengths = self.states[rows], self._lengths[rows]
        span = int(self._lengths.max()) if len(rows) else 0
        before = slice(self._filled - span, self._filled)
        # A prompt that follows is aligned on the right too.
        self._filled = max(span, self._longest)
        now = slice(self._filled - span, self._filled)
        for parts in self._memory:
            for part in parts:
                part[: len(rows), :, now] = part[rows, :, before]
        self._align()

    def step(self, tokens: Tensor) -> None:
        """Read the next token (B,) of each row."""
        with self._within():
            self.states = self._step(tokens[:, None], self._lengths[:, None])[:, 0]
        self._filled, self._lengths = self._filled + 1, self._lengths + 1

    def add(self, prompts: Sequence[Tokens]) -> None:
        """Read prompts into further rows: of no more tokens, and no more rows than at first."""
        before, rows = self.states, slice(len(self._lengths), len(self._lengths) + len(prompts))
        for parts in self._memory:
            for part in parts:
                # What a row that is gone has left is hidden, and must be a number all the same.
                part[rows] = 0
        self._read_all(prompts)
        self.states = torch.cat([before, self.states])

    def _read_all(self, prompts: Sequence[Tokens]) -> None:
        first = len(self._lengths)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        batches = token_batches(lengths, len(prompts))
        with self._within():
            read = [
                self._read([prompts[n] for n in rows.tolist()], first + rows) for rows in batches
            ]
        order = torch.cat(batches).argsort()
        self.states = torch.cat(read)[order.to(self._lengths.device)]
        self._lengths = torch.cat([self._lengths, lengths.to(self._lengths.device)])
        self._align()

    def _align(self) -> None:
        """What each row sees (B, 1, width), and the first column that any of them does."""
        starts = self._filled - self._lengths
        columns = torch.arange(self._width, device=starts.device)
        hidden = columns < starts[:, None, None]
        self._mask = torch.zeros(hidden.shape, device=starts.device).masked_fill_(
            hidden, -torch.inf
        )
        self._start = int(starts.min()) if len(starts) else self._filled

    def _read(self, prompts: Sequence[Tokens], rows: Tensor) -> Tensor:
        """States (b, D) behind some prompts, those of `rows` (b,)."""
        device = self._lengths.device
        ids, lengths = (tensor.to(device) for tensor in pad_rows(prompts))
        reading = Reading(self._parts, ids)
        row, place = length_mask(lengths, ids.shape[1]).nonzero(as_tuple=True)
        column = self._filled - lengths[row] + place
        new, kept = (row, slice(None), place), (rows.to(device)[row], slice(None), column)
        first = torch.arange(len(ids), device=device)
        *before, last = self._parts.layers
        for number, layer in enumerate(before):
            queries, keys, values = reading.heads(layer)
            self._put(number, kept, keys[new], values[new])
            reading.pass_through(layer, queries, keys, values)
        queries, keys, values = reading.heads(last)
        self._put(len(before), kept, keys[new], values[new])
        return reading.finish(last, queries, keys, values, first, lengths - 1)

    def _put(self, layer: int, kept: tuple[Any, ...], keys: Tensor, values: Tensor) -> None:
        """Write keys and values (N, H, E) of prompts to their places in the memory."""
        if len(self._memory) == layer:
            _, heads, size = keys.shape
            shape = self._most_rows, heads, self._width, size
            # What is hidden by the mask must be a number all the same.
            self._memory.append((keys.new_zeros(shape), values.new_zeros(shape)))
        for memory, new in zip(self._memory[layer], (keys, values), strict=True):
            memory[kept] = new

    def _step(self, ids: Tensor, places: Tensor) -> Tensor:
        states = embed(self._parts, ids, places)
        turn = turn_of(self._parts, states, places)
        rows, column = slice(len(ids)), slice(self._filled, self._filled + 1)
        columns = slice(self._start, self._filled + 1)
        mask = self._mask[:, :, columns]
        for layer, (keys, values) in zip(self._parts.layers, self._memory, strict=True):
            queries, key, value = layer.project(layer.attention_norm(states))
            write_by_head(key, turn, keys[rows, :, column])
            write_by_head(value, None, values[rows, :, column])
            seen = keys[rows, :, columns], values[rows, :, columns]
            states = layer.finish(states, attend(by_head(queries, turn), *seen, mask, layer.scale))
        return self._parts.norm(states)
