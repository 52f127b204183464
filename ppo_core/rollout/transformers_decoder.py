"""Prefill and decoding by the forward pass of transformers."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ppo_core.data.batching import pad_rows
from ppo_core.data.prompts import Tokens
from ppo_core.data.text_config import text_config
from ppo_core.errors import ModelError
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.kv_cache import (
    KVCache,
    SelectableCache,
    TransformersView,
    can_drop_sequences,
    empty_cache,
)


class TransformersBackend:
    """Backend that runs any decoder-only model by the forward pass of transformers."""

    drops_sequences = True

    def __init__(
        self,
        policy: LanguageModel,
        backbone: DecoderBackbone,
        cache: KVCache | SelectableCache,
        *,
        splits_prompts: bool,
    ) -> None:
        """Take an empty cache. With `splits_prompts`, prompts may be read in several passes."""
        self.cache = cache
        # A `SelectableCache` can only be filled by one pass.
        self.splits_prompts = splits_prompts and isinstance(cache, KVCache)
        self._backbone = backbone
        self._name = type(policy.model).__name__
        self._config = text_config(policy.model.config)
        self._past: Cache

    def prefill(self, prompts: Sequence[Tokens], sequences: Tensor) -> Tensor:
        """Read prompts into rows `sequences` (b,) of the cache; return their last states (b, D).

        Raises:
            ModelError: the model's cache cannot drop sequences.
        """
        device = self.cache.lengths.device
        ids, lengths = pad_rows(prompts, side="left")
        positions = torch.arange(ids.shape[1]) - (ids.shape[1] - lengths)[:, None]
        filled = empty_cache(self._config)
        states = self._backbone.hidden_states(
            ids.to(device),
            attention_mask=(positions >= 0).long().to(device),
            past_key_values=filled,
            use_cache=True,
            **self._backbone.position_inputs(positions.clamp(min=0).to(device)),
        )
        if not can_drop_sequences(filled):
            raise ModelError(
                f"{self._name} does not keep keys and values by sequence, so finished responses "
                "cannot be dropped from its cache while other responses continue."
            )
        self._store(filled, sequences)
        return states[:, -1]

    def decode(self, tokens: Tensor) -> Tensor:
        """Read each sequence's next token (B,); return the tokens' last hidden states (B, D)."""
        is_visible = self.cache.mask[:, 0, : self.cache.end + 1] == 0
        states = self._backbone.hidden_states(
            tokens[:, None],
            attention_mask=is_visible.long(),
            past_key_values=self._past,
            use_cache=True,
            **self._backbone.position_inputs(self.cache.lengths[:, None]),
        )
        return states[:, -1]

    def _store(self, filled: Cache, sequences: Tensor) -> None:
        """Move the keys and values of a prefill from `filled` to this backend's cache."""
        if isinstance(self.cache, SelectableCache):
            self._past = self.cache.cache = filled
            return
        columns = slice(self.cache.end - filled.get_seq_length(), self.cache.end)
        for number, layer in enumerate(filled.layers):
            assert isinstance(layer, DynamicLayer)
            assert layer.keys is not None and layer.values is not None
            self.cache.write(number, (sequences, slice(None), columns), layer.keys, layer.values)
            layer.reset()  # frees the layer's memory before the next layer is copied
        self._past = TransformersView(self.cache, len(filled.layers))
