"""Keys and values of sequences that grow together and all end in the same column."""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ppo_core.errors import ModelError
from ppo_core.rollout.left_padding import AlignedSequences

Index = tuple[Tensor, slice, Tensor | slice]
"""Index (sequences, all heads, columns) of a tensor (max_sequences, G, columns, E), which has G
heads of size E."""


class KVCache(AlignedSequences):
    """Keys and values of up to `max_sequences` sequences, in memory that is reserved once."""

    def __init__(
        self, max_sequences: int, longest_prompt: int, max_new_tokens: int, device: torch.device
    ) -> None:
        """Start without memory: the first `write` shows the number and the size of the heads."""
        super().__init__(longest_prompt, max_new_tokens, device)
        self.max_sequences = max_sequences
        self._layers: list[tuple[Tensor, Tensor]] = []
        """Keys and values (max_sequences, G, columns, E) of each layer."""

    def add(self, lengths: Tensor) -> None:
        """Append prompts of these lengths (b,); `write` then stores their keys and values."""
        first = len(self.lengths)
        for part in self._parts():
            # Clear the rows: masked columns have weight 0, but 0 times an earlier NaN is NaN.
            part[first : first + len(lengths)] = 0
        super().add(lengths)

    def keep(self, kept: Tensor) -> None:
        """Keep only the sequences `kept` (b,); move their keys and values to the first rows."""
        old_end = self.end
        self._select(kept)
        # Prompts that are added later also end at `end`, so the longest must fit before it. Keep no
        # more columns free, because some models accept no more columns than positions.
        self.end = max(self.longest, self._longest_prompt)
        self._align()
        old, new = (slice(end - self.longest, end) for end in (old_end, self.end))
        for part in self._parts():
            part[: len(kept), :, new] = part[kept, :, old]

    def write(self, layer: int, index: Index, keys: Tensor, values: Tensor) -> None:
        """Store the rotated keys and the values of prompts in one layer."""
        if len(self._layers) == layer:
            self._layers.append((self._reserve(keys), self._reserve(values)))
        for part, new in zip(self._layers[layer], (keys, values), strict=True):
            part[index] = new

    def next_column(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the memory for the keys and values (B, G, 1, E) of the next tokens."""
        return self._columns(layer, self.end, self.end + 1)

    def up_to_next(self, layer: int, first: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, G, S, E) from column `first` to the next token's column."""
        return self._columns(layer, first, self.end + 1)

    def block(self, layer: int, sequences: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of the first `sequences` and `columns`."""
        keys, values = self._layers[layer]
        return keys[:sequences, :, :columns], values[:sequences, :, :columns]

    def _columns(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[layer]
        sequences, columns = slice(len(self.lengths)), slice(first, end)
        return keys[sequences, :, columns], values[sequences, :, columns]

    def _reserve(self, like: Tensor) -> Tensor:
        heads, size = like.shape[1], like.shape[-1]
        return like.new_zeros(self.max_sequences, heads, self.width, size)

    def _parts(self) -> list[Tensor]:
        return [part for layer in self._layers for part in layer]


class TransformersView(DynamicCache):
    """A view of a `KVCache` that models of transformers read and write, one token at a time."""

    def __init__(self, cache: KVCache, num_layers: int) -> None:
        """Create a view of each layer of a cache."""
        super().__init__()
        self.layers = [_LayerView(cache, layer) for layer in range(num_layers)]


class _LayerView(DynamicLayer):
    def __init__(self, cache: KVCache, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._layer = layer
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self._cache.end

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.next_column(self._layer)
        keys.copy_(key_states)
        values.copy_(value_states)
        self.keys, self.values = self._cache.up_to_next(self._layer, 0)
        return self.keys, self.values


class SelectableCache(AlignedSequences):
    """Any cache of transformers that can drop sequences; prompts cannot be added later."""

    cache: Cache

    def keep(self, kept: Tensor) -> None:
        """Drop all sequences except `kept` (b,)."""
        self._select(kept)
        self._align()
        self.cache.batch_select_indices(kept)


def empty_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return an empty cache of transformers with the kind of layer that each model layer needs.

    Raises:
        ModelError: transformers cannot make a cache for the model type.
    """
    if not hasattr(config, "num_hidden_layers"):
        raise ModelError(
            f"The configuration of the model type {config.model_type} has no num_hidden_layers, "
            "so transformers cannot create a KV cache, and the model cannot be sampled from. Use "
            "another model."
        )
    return DynamicCache(config=config)


def own_windows(config: PreTrainedConfig) -> list[int]:
    """Return the window sizes of the cache layers whose class the model type itself defines."""
    layers = empty_cache(config).layers
    own = [layer for layer in layers if type(layer).__module__ != DynamicLayer.__module__]
    return [layer.sliding_window for layer in own if isinstance(layer, DynamicSlidingWindowLayer)]


def keeps_all_positions(cache: Cache) -> bool:
    """Return whether each layer keeps the keys and values of all positions, and nothing else."""
    return bool(cache.layers) and all(type(layer) is DynamicLayer for layer in cache.layers)


def can_drop_sequences(cache: Cache) -> bool:
    """Return whether a pass has filled the cache, and sequences can be dropped from it."""
    layers = cache.layers
    return bool(layers) and all(
        getattr(layer, "is_initialized", False) and hasattr(layer, "batch_select_indices")
        for layer in layers
    )
