"""Prefill and decoding by the forward pass of `decoder_forward`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.batching import pad_rows
from ppo_core.data.prompts import Tokens
from ppo_core.models.kernels.attention import Masking
from ppo_core.models.kernels.decoder_families import DecoderLayers
from ppo_core.models.kernels.decoder_forward import FullSequences, Selection, forward
from ppo_core.models.kernels.rotary import Angles, write_by_head
from ppo_core.rollout.captured_steps import CapturedSteps
from ppo_core.rollout.kv_cache import KVCache


class FastBackend:
    """Backend that computes a backbone's layers by `decoder_forward`."""

    splits_prompts = True
    drops_sequences = True

    def __init__(
        self,
        layers: DecoderLayers,
        cache: KVCache,
        within: Callable[[], AbstractContextManager[Any]],
        *,
        captures: bool = False,
    ) -> None:
        """Take an empty cache; forward passes run in the context `within()`.

        With `captures`, decoding steps are captured (see `captured_steps`). The cache must then be
        on a GPU.
        """
        self.cache = cache
        self._layers = layers
        self._within = within
        self._captured = CapturedSteps(layers, cache, within) if captures else None

    def prefill(self, prompts: Sequence[Tokens], sequences: Tensor) -> Tensor:
        """Read prompts into rows `sequences` (b,) of the cache; return their last states (b, D)."""
        device = self.cache.lengths.device
        ids, lengths = (tensor.to(device) for tensor in pad_rows(prompts))
        context = _Prompts(ids, lengths, sequences.to(device), self.cache)
        last = Selection(torch.arange(len(ids), device=device), lengths - 1)
        with self._within():
            return forward(self._layers, ids, context, last)

    def decode(self, tokens: Tensor) -> Tensor:
        """Read each sequence's next token (B,); return the tokens' last hidden states (B, D)."""
        if self._captured is not None:
            return self._captured.decode(tokens)
        with self._within():
            return forward(self._layers, tokens[:, None], _NextTokens(self.cache))[:, 0]


class _Prompts(FullSequences):
    """Context of a prefill, which stores the prompts' keys and values in a cache."""

    def __init__(self, ids: Tensor, lengths: Tensor, sequences: Tensor, cache: KVCache) -> None:
        super().__init__(ids)
        prompt, position = length_mask(lengths, ids.shape[1]).nonzero(as_tuple=True)
        column = cache.end - lengths[prompt] + position
        self._cache = cache
        self._from = prompt, slice(None), position
        self._to = sequences[prompt], slice(None), column

    def update(
        self, layer: int, keys: Tensor, values: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(layer, keys, values, angles)
        self._cache.write(layer, self._to, keys[self._from], values[self._from])
        return keys, values


class _NextTokens:
    """Context of a decoding step: each new token attends to itself and to its cached sequence."""

    masking = Masking.ANY

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._first = cache.first
        self.positions = cache.lengths[:, None]
        self.mask = cache.mask[:, :, cache.first : cache.end + 1]

    def update(
        self, layer: int, keys: Tensor, values: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor]:
        next_keys, next_values = self._cache.next_column(layer)
        write_by_head(keys, angles, next_keys)
        write_by_head(values, None, next_values)
        return self._cache.up_to_next(layer, self._first)
