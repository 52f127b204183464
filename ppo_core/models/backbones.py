"""Backbones of language models: the models without their heads, from token ids to hidden states."""

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
"""Function that returns a context manager to run a forward pass in, such as `using_adapter`."""


class DecoderBackbone:
    """Backbone of a decoder-only model."""

    def __init__(self, module: nn.Module, within: Within = nullcontext) -> None:
        """Wrap a backbone of transformers; its forward passes run in the context `within()`."""
        self.module = module
        self.within = within
        # A few families (Bloom, MPT) take no positions, and derive them from the attention mask.
        self._takes_position_ids = "position_ids" in inspect.signature(module.forward).parameters

    def position_inputs(self, position_ids: Tensor) -> dict[str, Tensor]:
        """Return the positions (B, S) as an input of `hidden_states`, if the model takes them."""
        return {"position_ids": position_ids} if self._takes_position_ids else {}

    def hidden_states(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Return last hidden states (B, S, D) of right-padded token ids (B, S).

        No mask is needed, because causal attention never attends to the padding on the right.
        """
        with self.within():
            output = self.module(input_ids=ids, **{"use_cache": False, **inputs})
        states: Tensor = output.last_hidden_state
        return states

    def states_at(self, ids: Tensor, sequence: Tensor, position: Tensor) -> Tensor:
        """Return last hidden states (N, D) at some positions of right-padded token ids (B, S).

        `sequence` and `position` (N,) name these positions, sorted by sequence.
        """
        decoder = fast_path(self.module)
        if decoder is None:
            return self.hidden_states(ids)[sequence, position]
        with self.within(), _products_of(decoder, ids):
            return states_at(decoder, ids, sequence, position)

    def products(self, ids: Tensor) -> AbstractContextManager[None]:
        """Return a context that computes matmuls by oneDNN, if the layers' matrices are large.

        `states_at` enters this context itself; also enter it for the backward pass of token ids
        (B, S). The context changes nothing where PyTorch's attention is used: oneDNN would also
        compute that attention, and make its backward pass much slower.
        """
        return _products_of(fast_path(self.module), ids)

    def states(self, rows: TokenRows) -> Tensor:
        """Return the hidden states (N, D) from which the counted tokens were sampled."""
        return self.states_at(rows.ids, rows.row, rows.state)


def _products_of(decoder: DecoderLayers | None, ids: Tensor) -> AbstractContextManager[None]:
    if decoder is None or not attention.uses_own_attention(ids.shape[1], ids.shape[1], ids.device):
        return nullcontext()
    return large_matmuls(max(weight.numel() for weight in decoder.layers[0].mlp.parameters()))


class EncoderDecoderBackbone:
    """Backbone of an encoder-decoder; the encoder reads the prompt, the decoder the response."""

    def __init__(self, model: PreTrainedModel, within: Within = nullcontext) -> None:
        """Wrap a `...ForConditionalGeneration`; forward passes run in the context `within()`."""
        self.module = model
        self._within = within
        config = model.config
        self._start = config.decoder_start_token_id
        # T5 with tied embeddings scales its hidden states before the LM head reads them.
        is_scaled = getattr(config, "scale_decoder_outputs", False)
        self._scale = config.d_model**-0.5 if is_scaled else 1.0

    def states(self, rows: TokenRows) -> Tensor:
        """Return the hidden states (N, D) from which the counted tokens were sampled."""
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
        # The decoder's start token has position 0, and replaces the prompt's last token.
        position = rows.state - (lengths[rows.row] - 1)
        return decoded[rows.row, position] * self._scale

    def _decoder_inputs(self, rows: TokenRows) -> Tensor:
        """Return the start token and each response without its last token, right-padded."""
        width = int((rows.lengths - rows.prompt_lengths).max())
        positions = rows.prompt_lengths[:, None] + torch.arange(width - 1, device=rows.ids.device)
        shifted = rows.ids.gather(1, positions.clamp(max=rows.ids.shape[1] - 1))
        return torch.nn.functional.pad(shifted, (1, 0), value=self._start)

    def products(self, ids: Tensor) -> AbstractContextManager[None]:
        """Return a context that changes nothing, as for a decoder with PyTorch's attention."""
        return nullcontext()


Backbone = DecoderBackbone | EncoderDecoderBackbone
