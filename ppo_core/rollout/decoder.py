"""Sequences that a model extends by one token per forward pass."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ppo_core.data.batching import token_batches
from ppo_core.data.prompts import Tokens
from ppo_core.data.text_config import text_config
from ppo_core.io.progress_bar import each_pass
from ppo_core.models.backbones import DecoderBackbone, Decoding
from ppo_core.models.kernels.decoder_families import fast_path
from ppo_core.models.kernels.packed_linear import packed
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.fast_decoder import FastBackend
from ppo_core.rollout.kv_cache import KVCache, SelectableCache, empty_cache, keeps_all_positions
from ppo_core.rollout.left_padding import AlignedSequences
from ppo_core.rollout.transformers_decoder import TransformersBackend
from ppo_core.rollout.whole_cache_decoder import WholeCacheBackend


class Backend(Protocol):
    """Forward passes of a model, and the KV cache that they read and write."""

    @property
    def cache(self) -> AlignedSequences:
        """Lengths of all sequences; in most backends also their keys and values."""

    @property
    def drops_sequences(self) -> bool:
        """Whether sequences can be dropped while others continue; `cache` then has `keep`."""

    @property
    def splits_prompts(self) -> bool:
        """Whether prompts of different lengths may be read in several passes, to save padding."""

    def prefill(self, prompts: Sequence[Tokens], sequences: Tensor) -> Tensor:
        """Read prompts into rows `sequences` (b,) of the cache; return their last states (b, D)."""

    def decode(self, tokens: Tensor) -> Tensor:
        """Read each sequence's next token (B,); return the tokens' last hidden states (B, D)."""


class Decoder:
    """Sequences that begin as prompts and grow by one token per `step`."""

    states: Tensor
    """(B, D) last hidden state at the last token of each sequence."""

    drops_sequences: bool
    """Whether sequences can be dropped while others continue."""

    def __init__(self, backend: Backend, prompts: Sequence[Tokens]) -> None:
        """Read the first prompts into the backend's empty cache."""
        self._backend = backend
        self._cache = backend.cache
        self.drops_sequences = backend.drops_sequences
        self.states = self._prefill(prompts)

    def step(self, tokens: Tensor) -> None:
        """Append the next token (B,) to each sequence."""
        self.states = self._backend.decode(tokens)
        self._cache.advance()

    def keep(self, kept: Tensor) -> None:
        """Drop all sequences except `kept` (b,); requires `drops_sequences`.

        A sequence whose response has the maximum length must be dropped before the next `step`.
        """
        assert isinstance(self._cache, KVCache | SelectableCache)
        self.states = self.states[kept]
        self._cache.keep(kept)

    def add(self, prompts: Sequence[Tokens]) -> None:
        """Append further prompts; requires `can_add_prompts`.

        No prompt may be longer than the longest of the first prompts, and the number of sequences
        may not exceed the number of the first prompts.
        """
        self.states = torch.cat([self.states, self._prefill(prompts)])

    def _prefill(self, prompts: Sequence[Tokens]) -> Tensor:
        """Read prompts in batches of similar length; return last states (b, D) in prompt order."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        batches = [torch.arange(len(prompts))]
        first, device = len(self._cache.lengths), self._cache.lengths.device
        if self._backend.splits_prompts:
            batches = token_batches(lengths, len(prompts), device=device)
        self._cache.add(lengths)
        states = [
            self._backend.prefill([prompts[n] for n in batch.tolist()], (first + batch).to(device))
            for batch in each_pass(batches, "reading prompts")
        ]
        return torch.cat(states)[torch.cat(batches).argsort().to(device)]


def new_decoder(
    policy: LanguageModel,
    backbone: DecoderBackbone,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    *,
    splits_prompts: bool,
) -> Decoder:
    """Return a decoder that has read the prompts, with the backend for `backbone.decoding`.

    The prompts must have equal lengths unless the backbone `pads_prompts`. The cache has memory for
    `max_new_tokens` more tokens of each sequence. With `splits_prompts`, prompts of different
    lengths may be read in several passes.

    Raises:
        ModelError: the model's cache cannot drop sequences, or transformers cannot make a cache for
            the model type.
    """
    size = max(map(len, prompts)), max_new_tokens, policy.device
    if not backbone.pads_prompts:
        return Decoder(WholeCacheBackend(policy, backbone, AlignedSequences(*size)), prompts)
    if backbone.decoding is Decoding.FAST:
        layers = fast_path(packed(backbone.module, len(prompts), passes=max_new_tokens))
        assert layers is not None, "The packed copy has the fast path, as its original."
        # Angles that depend on the longest sequence are computed on the host, so they cannot be
        # captured.
        captures = policy.device.type == "cuda" and not _has_dynamic_angles(policy)
        own_cache = KVCache(len(prompts), *size)
        fast = FastBackend(layers, own_cache, backbone.within, captures=captures)
        return Decoder(fast, prompts)
    cache: KVCache | SelectableCache = SelectableCache(*size)
    if keeps_all_positions(empty_cache(text_config(policy.model.config))):
        cache = KVCache(len(prompts), *size)
    backend = TransformersBackend(policy, backbone, cache, splits_prompts=splits_prompts)
    return Decoder(backend, prompts)


def can_add_prompts(policy: LanguageModel, backbone: DecoderBackbone) -> bool:
    """Return whether prompts can be added while other sequences are decoded.

    Prompts cannot be added to the model's own cache. They cannot be added either if a layer's cache
    holds anything other than the keys and values of all positions, or if the rotary angles depend
    on the longest sequence in the batch.
    """
    if not backbone.pads_prompts or _has_dynamic_angles(policy):
        return False
    if backbone.decoding is Decoding.FAST:
        return True
    return keeps_all_positions(empty_cache(text_config(policy.model.config)))


def _has_dynamic_angles(policy: LanguageModel) -> bool:
    """Return whether the rotary angles depend on the longest sequence in the batch."""
    parameters = getattr(text_config(policy.model.config), "rope_parameters", None) or {}
    each = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    kinds = {part["rope_type"] for part in each if "rope_type" in part}
    return not kinds.isdisjoint({"dynamic", "longrope"})
