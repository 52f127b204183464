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
from ppo_core.plain_decoder import PlainDecoding
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


def begin_decoding(
    policy: LanguageModel,
    trunk: DecoderTrunk,
    prompts: Sequence[Tokens],
    room: int,
    *,
    apart: bool,
) -> Decoding:
    """Read prompts, with room for so many tokens of each response.

    With `apart`, prompts of other lengths may be read in passes of their own: fewer fillers.
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
        self._trunk = trunk
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=policy.device)
        self._filled = int(lengths.max())
        # A place is visible to its row from the first real token on, response places included.
        columns = torch.arange(self._filled + room, device=policy.device)
        self._visible = (columns >= (self._filled - lengths)[:, None]).long()
        self._next_place = lengths
        self.states, self._cache = _read_prompts(
            policy, trunk, prompts, room=self._filled + room, apart=apart
        )

    def step(self, tokens: Tensor) -> None:
        self._filled += 1
        self.states = self._trunk.hidden_states(
            tokens[:, None],
            attention_mask=self._visible[:, : self._filled],
            past_key_values=self._cache,
            use_cache=True,
            **self._trunk.places(self._next_place[:, None]),
        )[:, -1]
        self._next_place = self._next_place + 1

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._visible, self._next_place = self._visible[rows], self._next_place[rows]


def _read_prompts(
    policy: LanguageModel,
    trunk: DecoderTrunk,
    prompts: Sequence[Tokens],
    *,
    room: int,
    apart: bool,
) -> tuple[Tensor, Cache]:
    """States (B, D) behind the prompts, and a cache of them with room for so many columns."""
    config = policy.model.config
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    apart = apart and keeps_all(empty_cache(config))
    batches = token_batches(lengths, len(prompts)) if apart else [torch.arange(len(prompts))]
    states, caches = [], []
    for batch in batches:
        ids, filled = pad_rows([prompts[n] for n in batch.tolist()], side="left")
        places = torch.arange(ids.shape[1]) - (ids.shape[1] - filled)[:, None]
        cache = empty_cache(config)
        hidden = trunk.hidden_states(
            ids.to(policy.device),
            attention_mask=(places >= 0).long().to(policy.device),
            past_key_values=cache,
            use_cache=True,
            **trunk.places(places.clamp(min=0).to(policy.device)),
        )
        states.append(hidden[:, -1])
        caches.append(cache)
    order = torch.cat(batches).argsort().to(policy.device)
    last = torch.cat(states)[order]
    return last, joined(caches, batches, room=room) if keeps_all(caches[0]) else caches[0]
