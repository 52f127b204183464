"""Prefill and decode by the methods that `generate` calls, with the model's own cache."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_core.data.prompts import Tokens
from ppo_core.data.text_config import text_config
from ppo_core.models.backbones import DecoderBackbone, Decoding
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.kv_cache import empty_cache
from ppo_core.rollout.left_padding import AlignedSequences


class WholeCacheBackend:
    """Backend for prompts of equal length; each step gets the cache that the step before returned.

    No prompt is padded, and no sequence is dropped or added. So the backend also decodes models
    whose state cannot be split or concatenated (recurrent, linear attention, convolution), and
    models that handle padding on the left incorrectly.
    """

    splits_prompts = False
    drops_sequences = False

    def __init__(
        self, policy: LanguageModel, backbone: DecoderBackbone, cache: AlignedSequences
    ) -> None:
        """Take an empty `cache`, which only counts lengths; the model stores keys and values."""
        self.cache = cache
        # Every model with `generate` has a method for each of its steps.
        self._model: Any = policy.model
        self._pad_token = policy.pad_token
        self._backbone = backbone
        self._counts_positions = backbone.decoding is Decoding.COUNTING
        self._ids: Tensor
        self._inputs: dict[str, Any]

    def prefill(self, prompts: Sequence[Tokens], sequences: Tensor) -> Tensor:
        """Read all prompts, which have equal lengths; return their last states (b, D)."""
        self._ids = torch.tensor(prompts, device=self.cache.lengths.device)
        self._inputs = self._first_inputs()
        return self._read(is_first_iteration=True)

    def decode(self, tokens: Tensor) -> Tensor:
        """Read each sequence's next token (B,); return the tokens' last hidden states (B, D)."""
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=1)
        pad = self._pad_token
        if self._counts_positions and pad is not None and bool((self._ids == pad).any()):
            # The model does not count a pad token as a position, but its cache does: use no cache.
            return self._backbone.hidden_states(self._ids)[:, -1]
        return self._read(next_sequence_length=1)

    def _first_inputs(self) -> dict[str, Any]:
        """Return the inputs that `generate` gives to a model in addition to the prompts."""
        inputs: dict[str, Any] = {"use_cache": True, "attention_mask": torch.ones_like(self._ids)}
        takes_positions = "position_ids" in inspect.signature(self._model.forward).parameters
        if takes_positions and not self._counts_positions:
            inputs["position_ids"] = self._model._prepare_position_ids_for_generation(
                self._ids, inputs
            )
        if self._model._supports_default_dynamic_cache():
            name = "cache_params" if "mamba" in type(self._model).__name__.lower() else None
            inputs[name or "past_key_values"] = empty_cache(text_config(self._model.config))
        return inputs

    def _read(self, **step: Any) -> Tensor:
        prepared = self._model.prepare_inputs_for_generation(self._ids, **step, **self._inputs)
        states, output = self._backbone.read(**prepared)
        self._inputs = self._model._update_model_kwargs_for_generation(output, self._inputs)
        return states[:, -1]
