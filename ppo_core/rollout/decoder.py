"""Sequences that a model extends by one token per pass."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ppo_core.data.batching import token_batches
from ppo_core.data.prompts import Tokens
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.kernels.decoder_families import fast_path
from ppo_core.models.kernels.packed_linear import packed
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.fast_decoder import FastBackend
from ppo_core.rollout.kv_cache import KVCache, SelectableCache, empty_cache, keeps_all_positions
from ppo_core.rollout.transformers_decoder import TransformersBackend


class Backend(Protocol):
    """The forward passes of a model, and the cache that they read and write."""

    @property
    def cache(self) -> KVCache | SelectableCache:
        """The keys and values of all sequences."""

    @property
    def splits_prompts(self) -> bool:
        """Whether prompts of different lengths may be read in several passes: less padding."""

    def prefill(self, prompts: Sequence[Tokens], sequences: Tensor) -> Tensor:
        """Read prompts into `sequences` (b,) of the cache; returns their last states (b, D)."""

    def decode(self, tokens: Tensor) -> Tensor:
        """Read the next token (B,) of each sequence; returns its states (B, D)."""


class Decoder:
    """Sequences that begin as prompts and grow by one token per `step`."""

    states: Tensor
    """(B, D), last hidden state of the last token of each sequence."""

    def __init__(self, backend: Backend, prompts: Sequence[Tokens]) -> None:
        """Read the first prompts into an empty cache."""
        self._backend = backend
        self._cache = backend.cache
        self.states = self._prefill(prompts)

    def step(self, tokens: Tensor) -> None:
        """Append the next token (B,) to each sequence."""
        self.states = self._backend.decode(tokens)
        self._cache.advance()

    def keep(self, kept: Tensor) -> None:
        """Drop all sequences but `kept` (b,).

        A sequence that has all its new tokens must be dropped before the next `step`.
        """
        self.states = self.states[kept]
        self._cache.keep(kept)

    def add(self, prompts: Sequence[Tokens]) -> None:
        """Read further prompts, if the model `can_add_prompts`.

        None may be longer than the longest of the first, and there may never be more sequences than
        at first.
        """
        self.states = torch.cat([self.states, self._prefill(prompts)])

    def _prefill(self, prompts: Sequence[Tokens]) -> Tensor:
        """Read prompts in batches of similar length; returns their last states (b, D) in order."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        batches = [torch.arange(len(prompts))]
        if self._backend.splits_prompts:
            batches = token_batches(lengths, len(prompts))
        first, device = len(self._cache.lengths), self._cache.lengths.device
        self._cache.add(lengths)
        states = [
            self._backend.prefill([prompts[n] for n in batch.tolist()], (first + batch).to(device))
            for batch in batches
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
    """Read prompts by the fastest backend for the model, with memory for their responses.

    With `splits_prompts`, prompts of different lengths may be read in several passes.

    Raises:
        ModelError: the model's cache cannot drop sequences.
    """
    size = max(map(len, prompts)), max_new_tokens, policy.device
    if fast_path(backbone.module) is not None:
        layers = fast_path(packed(backbone.module, len(prompts), passes=max_new_tokens))
        assert layers is not None, "The packed copy is of the same family."
        fast = FastBackend(layers, KVCache(len(prompts), *size), backbone.within)
        return Decoder(fast, prompts)
    cache: KVCache | SelectableCache = SelectableCache(*size)
    if keeps_all_positions(empty_cache(policy.model.config)):
        cache = KVCache(len(prompts), *size)
    backend = TransformersBackend(policy, backbone, cache, splits_prompts=splits_prompts)
    return Decoder(backend, prompts)


def can_add_prompts(policy: LanguageModel, backbone: DecoderBackbone) -> bool:
    """Return whether prompts can be added while others are decoded.

    They cannot where layers keep anything but the keys and values of all positions, nor where the
    rotary angles of a sequence depend on the longest sequence beside it.
    """
    config = policy.model.config
    is_fast = fast_path(backbone.module) is not None
    keeps_all = is_fast or keeps_all_positions(empty_cache(config))
    return keeps_all and _rotary_kinds(config).isdisjoint({"dynamic", "longrope"})


def _rotary_kinds(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of rotary embedding of all layers."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return {part["rope_type"] for part in each if "rope_type" in part}
