"""How responses grow by a token a pass: by a forward pass of ours, or by that of transformers."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from ppo_core.data.batching import pad_rows, token_batches
from ppo_core.data.prompts import Tokens
from ppo_core.errors import ModelError
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.kernels.decoder_families import fast_path
from ppo_core.models.kernels.packed_linear import packed
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.fast_decoder import PlainDecoding
from ppo_core.rollout.kv_cache import ReservedCache, can_choose_rows, empty_cache, keeps_all


class Decoding(Protocol):
    """Rows of tokens, and what a model made of them."""

    states: Tensor
    """(B, D) behind the last token of each row."""

    def step(self, tokens: Tensor) -> None:
        """Read the next token (B,) of each row."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows (b,) alone."""

    def add(self, prompts: Sequence[Tokens]) -> None:
        """Read prompts into further rows, if the model `takes_more`.

        No prompt may be longer than the longest of the first, nor may there be more rows than then.
        """


def takes_more(policy: LanguageModel, backbone: DecoderBackbone) -> bool:
    """Whether prompts can follow while others are decoded.

    Not where layers keep other things than the keys and values of all places, nor where the angles
    of a row depend on the longest beside it.
    """
    config = policy.model.config
    keeps = fast_path(backbone.module) is not None or keeps_all(empty_cache(config))
    return keeps and _rotary_kinds(config).isdisjoint({"dynamic", "longrope"})


def _rotary_kinds(config: PreTrainedConfig) -> set[str]:
    """Those of all layers, which may have one each."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return {part["rope_type"] for part in each if "rope_type" in part}


def begin_decoding(
    policy: LanguageModel,
    backbone: DecoderBackbone,
    prompts: Sequence[Tokens],
    room: int,
    *,
    apart: bool,
) -> Decoding:
    """Read prompts, with room for so many tokens of each response.

    A row that has so many is left out by `keep`. With `apart`, prompts of other lengths may be read
    in passes of their own: fewer fillers.
    """
    if fast_path(backbone.module) is None:
        return _TransformersDecoding(policy, backbone, prompts, room, apart=apart)
    parts = fast_path(packed(backbone.module, len(prompts), passes=room))
    assert parts is not None, "The packed copy is of the same family."
    return PlainDecoding(parts, prompts, room, within=backbone.within, device=policy.device)


class _TransformersDecoding:
    """Any decoder of transformers, with a cache of its own kind.

    Rows are aligned on the right, so that the next tokens of all stand in the same column.
    """

    states: Tensor

    def __init__(
        self,
        policy: LanguageModel,
        backbone: DecoderBackbone,
        prompts: Sequence[Tokens],
        room: int,
        *,
        apart: bool,
    ) -> None:
        self._policy = policy
        self._backbone = backbone
        self._room = room
        self._most_rows = len(prompts)
        self._longest = self._filled = max(map(len, prompts))
        self._lengths = torch.zeros(0, dtype=torch.long, device=policy.device)
        self._reserved: ReservedCache | None = None
        self._cache: Cache
        # Other caches cannot be put together of those of several passes.
        self._apart = apart and keeps_all(empty_cache(policy.model.config))
        self.states = self._read_all(prompts)

    def keep(self, rows: Tensor) -> None:
        self.states, self._lengths = self.states[rows], self._lengths[rows]
        if self._reserved is None:
            self._cache.batch_select_indices(rows)
            return
        span = int(self._lengths.max()) if len(rows) else 0
        # So a prompt that follows has room, and some models take no more columns than places.
        self._filled = max(span, self._longest)
        self._reserved.move(rows, span, self._filled)

    def step(self, tokens: Tensor) -> None:
        self._filled += 1
        # A column is visible to its row from the first real token on.
        columns = torch.arange(1, self._filled + 1, device=tokens.device)
        visible = columns >= (self._filled - self._lengths)[:, None]
        self.states = self._backbone.hidden_states(
            tokens[:, None],
            attention_mask=visible.long(),
            past_key_values=self._cache,
            use_cache=True,
            **self._backbone.places(self._lengths[:, None]),
        )[:, -1]
        self._lengths = self._lengths + 1

    def add(self, prompts: Sequence[Tokens]) -> None:
        self.states = torch.cat([self.states, self._read_all(prompts)])

    def _read_all(self, prompts: Sequence[Tokens]) -> Tensor:
        """States (b, D) behind prompts, which become further rows."""
        first, device = len(self._lengths), self._lengths.device
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        batches = [torch.arange(len(prompts))]
        if self._apart:
            batches = token_batches(lengths, len(prompts))
        read = [self._read([prompts[n] for n in rows.tolist()], first + rows) for rows in batches]
        if self._reserved is not None:
            self._reserved.show(first + len(prompts), self._filled)
        self._lengths = torch.cat([self._lengths, lengths.to(device)])
        return torch.cat(read)[torch.cat(batches).argsort().to(device)]

    def _read(self, prompts: Sequence[Tokens], rows: Tensor) -> Tensor:
        """States (b, D) behind prompts of one pass, those of `rows` (b,)."""
        device = self._lengths.device
        ids, lengths = pad_rows(prompts, side="left")
        places = torch.arange(ids.shape[1]) - (ids.shape[1] - lengths)[:, None]
        cache: Cache = empty_cache(self._policy.model.config)
        hidden = self._backbone.hidden_states(
            ids.to(device),
            attention_mask=(places >= 0).long().to(device),
            past_key_values=cache,
            use_cache=True,
            **self._backbone.places(places.clamp(min=0).to(device)),
        )
        self._take(cache, rows)
        return hidden[:, -1]

    def _take(self, cache: Cache, rows: Tensor) -> None:
        """Go on with what a pass over prompts left, those of `rows` (b,)."""
        if not can_choose_rows(cache):
            raise ModelError(
                f"{type(self._policy.model).__name__} does not keep keys and values by rows, so "
                "responses that go on cannot leave those behind that have ended. Train it with "
                "ppo_core.classic, which generates by transformers."
            )
        if not keeps_all(cache):
            self._cache = cache
            return
        if self._reserved is None:
            places = self._longest + self._room
            self._cache = self._reserved = ReservedCache(cache, self._most_rows, places)
            self._reserved.show(self._most_rows, self._filled)
        self._reserved.put(rows, cache)
