"""Backbones of language models: the models without their heads, from token ids to hidden states."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.text_config import text_config
from ppo_core.data.types import TokenRows
from ppo_core.errors import ModelError
from ppo_core.models.kernels import attention
from ppo_core.models.kernels.decoder_families import DecoderLayers, fast_path
from ppo_core.models.kernels.decoder_forward import last_states, states_at
from ppo_core.models.kernels.matmul_backend import large_matmuls

Within = Callable[[], AbstractContextManager[Any]]
"""Function that returns a context manager to run a forward pass in, such as `using_adapter`."""


class Decoding(Enum):
    """Ways to decode with a backbone, the fastest first."""

    FAST = "the fast path"
    PADDED = "transformers' cache with padding"
    BY_LENGTH = "the model's own cache, prompts of one length at a time"
    COUNTING = "the model's own cache and positions, prompts of one length at a time"
    """Needed by RoBERTa: its positions do not begin at 0, but `generate` assumes that they do."""


class DecoderBackbone:
    """Backbone of a decoder-only model."""

    fastest = Decoding.FAST
    """Fastest way to decode that no check has rejected. If it is FAST, `states_at` also uses the
    fast path."""

    is_checked = False
    """Whether a check chose `fastest`."""

    passes_mask = False
    """Whether the model needs a mask to ignore padding on the right."""

    def __init__(
        self, module: nn.Module, within: Within = nullcontext, *, head: nn.Module | None = None
    ) -> None:
        """Wrap a backbone of transformers; its forward passes run in the context `within()`.

        With a `head`, `module` is a model with this LM head, and the hidden states are the head's
        inputs.
        """
        self.module = module
        self.within = within
        self._head = head
        # A few families (Bloom, MPT) take no positions, and derive them from the attention mask.
        self._takes_position_ids = "position_ids" in inspect.signature(module.forward).parameters

    @classmethod
    def of_model(cls, model: PreTrainedModel, within: Within = nullcontext) -> "DecoderBackbone":
        """Return the backbone of a model with an LM head."""
        base = model.base_model
        # In a few families (Llama 4), `base_model` is the model itself, with the head.
        return cls.up_to_head(model, within) if base is model else cls(base, within)

    @classmethod
    def up_to_head(cls, model: PreTrainedModel, within: Within = nullcontext) -> "DecoderBackbone":
        """Return the backbone with all layers before the LM head's matmul.

        BERT's head, for example, transforms the states before this matmul.
        """
        return cls(model, within, head=model.get_output_embeddings())

    def position_inputs(self, position_ids: Tensor) -> dict[str, Tensor]:
        """Return the positions (B, S) as an input of `hidden_states`, if the model takes them."""
        return {"position_ids": position_ids} if self._takes_position_ids else {}

    def hidden_states(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Return last hidden states (B, S, D) of right-padded token ids (B, S).

        Most models need no mask: causal attention never attends to the padding on the right.
        """
        return self.read(input_ids=ids, **{"use_cache": False, **inputs})[0]

    def read(self, **inputs: Any) -> tuple[Tensor, Any]:
        """Return last hidden states (B, S, D), and the module's output with its cache."""
        with self.within():
            if self._head is None:
                output = self.module(**inputs)
                return output.last_hidden_state, output
            with _inputs_of(self._head) as states:
                output = self.module(**inputs)
            return states[-1], output

    @torch.no_grad()
    def width(self) -> int:
        """Return D, the hidden size, by a forward pass: configurations differ in its name."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=next(self.module.parameters()).device)
        return self.hidden_states(ids).shape[-1]

    def fast_layers(self) -> DecoderLayers | None:
        """Return the modules that the fast path computes, or None if the fast path is not used."""
        return fast_path(self.module) if self.fastest is Decoding.FAST else None

    @property
    def decoding(self) -> Decoding:
        """Current way to decode; FAST only if the fast path supports the model."""
        if self.fastest is Decoding.FAST and self.fast_layers() is None:
            return Decoding.PADDED
        return self.fastest

    @property
    def pads_prompts(self) -> bool:
        """Whether prompts of different lengths are decoded together, padded on the left."""
        return self.fastest in (Decoding.FAST, Decoding.PADDED)

    def states_at(
        self, ids: Tensor, sequence: Tensor, position: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """Return last hidden states (N, D) at some positions of right-padded token ids (B, S).

        `sequence` and `position` (N,) are indices into `ids`, sorted by sequence. The lengths (B,)
        of the sequences are needed if `passes_mask` is True.
        """
        decoder = self.fast_layers()
        if decoder is None:
            mask = {}
            if self.passes_mask:
                assert lengths is not None, "The model needs a mask."
                mask = {"attention_mask": length_mask(lengths, ids.shape[1]).long()}
            return self.hidden_states(ids, **mask)[sequence, position]
        with self.within(), _products_of(decoder, ids):
            return states_at(decoder, ids, sequence, position)

    def last_states(self, pairs: Tensor, lengths: Tensor) -> Tensor:
        """Return hidden states (2B, D) at the last tokens of right-padded pairs (B, 2, S).

        For short sequences on a CPU, the fast path computes the common start of a pair once.
        `lengths` (B, 2) are at least 1.
        """
        ids, decoder = pairs.flatten(0, 1), self.fast_layers()
        if decoder is None or not _uses_own_attention(ids):
            sequence = torch.arange(len(ids), device=ids.device)
            return self.states_at(ids, sequence, lengths.flatten() - 1, lengths.flatten())
        with self.within(), _products_of(decoder, ids):
            return last_states(decoder, pairs, lengths)

    def products(self, ids: Tensor) -> AbstractContextManager[None]:
        """Return a context that computes matmuls by oneDNN, if the layers' matrices are large.

        `states_at` enters this context itself. The caller enters it for the backward pass of token
        ids (B, S). If PyTorch computes the attention, the context has no effect: PyTorch would use
        oneDNN for the attention, too, and the attention's backward pass would be much slower.
        """
        return _products_of(self.fast_layers(), ids)

    def states(self, rows: TokenRows) -> Tensor:
        """Return the hidden states (N, D) from which the counted tokens were sampled."""
        return self.states_at(rows.ids, rows.row, rows.state, rows.lengths)


@contextmanager
def _inputs_of(head: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of the head; in this context the head returns its input unchanged."""
    inputs: list[Tensor] = []

    def record(states: Tensor) -> Tensor:
        inputs.append(states)
        return states

    replaced = vars(head).get("forward")
    vars(head)["forward"] = record
    try:
        yield inputs
    finally:
        del vars(head)["forward"]
        if replaced is not None:
            vars(head)["forward"] = replaced


def _products_of(decoder: DecoderLayers | None, ids: Tensor) -> AbstractContextManager[None]:
    if decoder is None or not _uses_own_attention(ids):
        return nullcontext()
    return large_matmuls(max(weight.numel() for weight in decoder.layers[0].mlp.parameters()))


def _uses_own_attention(ids: Tensor) -> bool:
    return attention.uses_own_attention(ids.shape[1], ids.shape[1], ids.device)


class EncoderDecoderBackbone:
    """Encoder-decoder backbone: the encoder reads the prompt, and the decoder the response."""

    def __init__(self, model: PreTrainedModel, within: Within = nullcontext) -> None:
        """Wrap a `...ForConditionalGeneration`; forward passes run in the context `within()`.

        Raises:
            ModelError: the configuration lacks `decoder_start_token_id` or `d_model`.
        """
        self.module = model
        self._within = within
        config = model.config
        fields = ("decoder_start_token_id", "d_model")
        if missing := [name for name in fields if getattr(config, name, None) is None]:
            raise ModelError(
                f"{type(model).__name__} (model type {config.model_type}) has an encoder beside "
                f"its decoder, and its configuration does not set {' and '.join(missing)}, so its "
                "decoder cannot be run on text. Use a decoder-only model."
            )
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

    def width(self) -> int:
        """Return D, the size of a hidden state."""
        return int(self.module.config.d_model)

    def _decoder_inputs(self, rows: TokenRows) -> Tensor:
        """Return the start token and each response without its last token, right-padded."""
        width = int((rows.lengths - rows.prompt_lengths).max())
        positions = rows.prompt_lengths[:, None] + torch.arange(width - 1, device=rows.ids.device)
        shifted = rows.ids.gather(1, positions.clamp(max=rows.ids.shape[1] - 1))
        return torch.nn.functional.pad(shifted, (1, 0), value=self._start)

    def products(self, ids: Tensor) -> AbstractContextManager[None]:
        """Return a context without effect: the matmul backend is not changed."""
        return nullcontext()


Backbone = DecoderBackbone | EncoderDecoderBackbone


def freeze_unread_parts(module: nn.Module) -> None:
    """Freeze the weights through which no text passes, such as a vision tower with its projector.

    In several processes, DistributedDataParallel waits for a gradient of every weight that is not
    frozen.
    """
    for model in module.modules():
        if not isinstance(model, PreTrainedModel) or model.base_model is not model:
            continue
        if model.config.is_encoder_decoder or text_config(model.config) is model.config:
            continue
        read = set(model.get_decoder().parameters())
        # Otherwise this is not the decoder of texts.
        if read.issuperset(model.get_input_embeddings().parameters()):
            for weight in set(model.parameters()) - read:
                weight.requires_grad_(False)
