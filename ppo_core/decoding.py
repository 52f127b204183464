"""How responses grow by a token a pass: by a forward pass of ours, or by that of transformers."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import Cache

from ppo_core.batches import token_batches
from ppo_core.kv_cache import empty_cache, joined, keeps_all
from ppo_core.models import LanguageModel
from ppo_core.packed_weights import packed
from ppo_core.plain_decoding import PlainDecoding
from ppo_core.plain_layers import plain_layers
from ppo_core.prompts import Tokens
from ppo_core.tensors import pad_rows
from ppo_core.trunks import DecoderTrunk


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


def takes_more(policy: LanguageModel, trunk: DecoderTrunk) -> bool:
    """Whether prompts can follow while others are decoded.

    Not where layers keep other things than the keys and values of all places.
    """
    return plain_layers(trunk.backbone) is not None or keeps_all(empty_cache(policy.model.config))


def begin_decoding(
    policy: LanguageModel,
    trunk: DecoderTrunk,
    prompts: Sequence[Tokens],
    room: int,
    *,
    apart: bool,
) -> Decoding:
    """Read prompts, with room for so many tokens of each response.

    A row that has so many is left out by `keep`. With `apart`, prompts of other lengths may be read
    in passes of their own: fewer fillers.
    """
    if plain_layers(trunk.backbone) is None:
        return _TransformersDecoding(policy, trunk, prompts, room, apart=apart)
    parts = plain_layers(packed(trunk.backbone, len(prompts), passes=room))
    assert parts is not None, "The packed copy is of the same family."
    return PlainDecoding(parts, prompts, room, within=trunk.within, device=policy.device)


class _TransformersDecoding:
    """Any decoder of transformers, with a cache of its own kind.

    Rows are aligned on the right, so that the next tokens of all stand in the same column.
    """

    states: Tensor

    def __init__(
        self,
        policy: LanguageModel,
        trunk: DecoderTrunk,
        prompts: Sequence[Tokens],
        room: int,
        *,
        apart: bool,
    ) -> None:
        self._policy = policy
        self._trunk = trunk
        self._room = room
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=policy.device)
        self._filled = int(self._lengths.max())
        self._is_reserved = keeps_all(empty_cache(policy.model.config))
        batches = [torch.arange(len(prompts))]
        if apart and self._is_reserved:
            batches = token_batches(self._lengths.cpu(), len(prompts))
        self.states, caches = self._read(prompts, batches)
        self._cache = self._joined(caches, batches) if self._is_reserved else caches[0]

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self.states, self._lengths = self.states[rows], self._lengths[rows]

    def step(self, tokens: Tensor) -> None:
        self._filled += 1
        # A column is visible to its row from the first real token on.
        columns = torch.arange(1, self._filled + 1, device=tokens.device)
        visible = columns >= (self._filled - self._lengths)[:, None]
        self.states = self._trunk.hidden_states(
            tokens[:, None],
            attention_mask=visible.long(),
            past_key_values=self._cache,
            use_cache=True,
            **self._trunk.places(self._lengths[:, None]),
        )[:, -1]
        self._lengths = self._lengths + 1

    def add(self, prompts: Sequence[Tokens]) -> None:
        before = len(self._lengths)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        batches = token_batches(lengths, len(prompts))
        states, caches = self._read(prompts, batches)
        self.states = torch.cat([self.states, states])
        self._lengths = torch.cat([self._lengths, lengths.to(self._lengths.device)])
        self._filled = int(self._lengths.max())
        rows = [torch.arange(before), *(before + batch for batch in batches)]
        self._cache = self._joined([self._cache, *caches], rows)

    def _joined(self, caches: Sequence[Cache], rows: Sequence[Tensor]) -> Cache:
        return joined(caches, rows, width=self._filled, room=self._filled + self._room)

    def _read(
        self, prompts: Sequence[Tokens], batches: Sequence[Tensor]
    ) -> tuple[Tensor, list[Cache]]:
        """States (B, D) behind prompts that are read in batches, and a cache of each batch."""
        device = self._lengths.device
        states: list[Tensor] = []
        caches: list[Cache] = []
        for batch in batches:
            ids, filled = pad_rows([prompts[n] for n in batch.tolist()], side="left")
            places = torch.arange(ids.shape[1]) - (ids.shape[1] - filled)[:, None]
            cache = empty_cache(self._policy.model.config)
            hidden = self._trunk.hidden_states(
                ids.to(device),
                attention_mask=(places >= 0).long().to(device),
                past_key_values=cache,
                use_cache=True,
                **self._trunk.places(places.clamp(min=0).to(device)),
            )
            states.append(hidden[:, -1])
            caches.append(cache)
        order = torch.cat([*batches]).argsort().to(device)
        return torch.cat(states)[order], caches
