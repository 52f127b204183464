"""The part of a language model below its head: token rows in, hidden states out."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.types import TokenRows
from ppo_core.models.kernels import attention
from ppo_core.models.kernels.decoder_families import DecoderLayers, fast_path
from ppo_core.models.kernels.decoder_forward import states_at
from ppo_core.models.kernels.matmul_backend import large_matmuls

Within = Callable[[], AbstractContextManager[Any]]
"""Makes the context of a forward pass, such as the adapter that it uses."""


class DecoderBackbone:
    """A decoder-only backbone."""

    def __init__(self, module: nn.Module, within: Within = nullcontext) -> None:
        """Take a backbone of transformers; it runs inside `within()`."""
        self.module = module
        self.within = within
        # The few families without (Bloom, MPT) derive the places from the mask.
        self._takes_position_ids = "position_ids" in inspect.signature(module.forward).parameters

    def places(self, position_ids: Tensor) -> dict[str, Tensor]:
        """The places (B, S) of tokens, as `hidden_states` takes them."""
        return {"position_ids": position_ids} if self._takes_position_ids else {}

    def hidden_states(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Last hidden states (B, S, D) of token ids (B, S), filled up on the right.

        A causal row never sees what follows it, so fillers on the right need no mask.
        """
        with self.within():
            output = self.module(input_ids=ids, **{"use_cache": False, **inputs})
        states: Tensor = output.last_hidden_state
        return states

    def states_at(self, ids: Tensor, row: Tensor, place: Tensor) -> Tensor:
        """Last hidden states (N, D) at chosen places of token ids (B, S), filled up on the right.

        `row` and `place` (N,) say where, row by row.
        """
        parts = fast_path(self.module)
        if parts is None:
            return self.hidden_states(ids)[row, place]
        with self.within(), _products_of(parts, ids):
            return states_at(parts, ids, row, place)

    def products(self, ids: Tensor) -> AbstractContextManager[None]:
        """Multiply inside by the library for large matrices, if those of the layers are large.

        `states_at` does so itself; whoever goes back through a pass over token ids (B, S) must
        once more. Where attention is not our own nothing changes: it is multiplied by the same
        library, and the backward pass of PyTorch's takes five times as long by oneDNN.
        """
        return _products_of(fast_path(self.module), ids)

    def states(self, rows: TokenRows) -> Tensor:
        """Hidden states (N, D) in which the counted tokens were sampled."""
        return self.states_at(rows.ids, rows.row, rows.state)


def _products_of(parts: DecoderLayers | None, ids: Tensor) -> AbstractContextManager[None]:
    if parts is None or not attention.is_own(ids.shape[1], ids.shape[1], ids.device):
        return nullcontext()
    return large_matmuls(max(weight.numel() for weight in parts.layers[0].mlp.parameters()))


class EncoderDecoderBackbone:
    """Encoder and decoder of a sequence-to-sequence model: the prompt is what is encoded."""

    def __init__(self, model: PreTrainedModel, within: Within = nullcontext) -> None:
        """Take a `...ForConditionalGeneration`; it runs inside `within()`."""
        self.module = model
        self._within = within
        config = model.config
        self._start = config.decoder_start_token_id
        # T5 with tied embeddings shrinks its states before any head reads them.
        shrinks = getattr(config, "scale_decoder_outputs", False)
        self._scale = config.d_model**-0.5 if shrinks else 1.0

    def states(self, rows: TokenRows) -> Tensor:
        """Hidden states (N, D) in which the counted tokens were sampled."""
        lengths = rows.prompt_lengths
        encoded = rows.ids[:, : int(lengths.max())]
        visible = length_mask(lengths, encoded.shape[1])
        encoder, decoder = self.module.get_encoder(), self.module.get_decoder()
        with self._within():
            encoded_states = encoder(
                input_ids=torch.where(visible, encoded, 0), attention_mask=visible.long()
            ).last_hidden_state
            decoded: Tensor = decoder(
                input_ids=self._decoder_inputs(rows),
                encoder_hidden_states=encoded_states,
                encoder_attention_mask=visible.long(),
                use_cache=False,
            ).last_hidden_state
        # In joined rows the state before the first response token is the prompt's last place.
        place = rows.state - (lengths[rows.row] - 1)
        return decoded[rows.row, place] * self._scale

    def _decoder_inputs(self, rows: TokenRows) -> Tensor:
        """The start token and each response without its last token, filled up on the right."""
        width = int((rows.lengths - rows.prompt_lengths).max())
        places = rows.prompt_lengths[:, None] + torch.arange(width - 1, device=rows.ids.device)
        shifted = rows.ids.gather(1, places.clamp(max=rows.ids.shape[1] - 1))
        return torch.nn.functional.pad(shifted, (1, 0), value=self._start)

    def products(self, ids: Tensor) -> AbstractContextManager[None]:
        """As for a decoder whose attention is not our own."""
        return nullcontext()


Backbone = DecoderBackbone | EncoderDecoderBackbone
