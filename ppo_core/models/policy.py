"""The policy or the reference: a language model, split into its backbone and its LM head."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_core.data.text_config import text_config
from ppo_core.data.types import TokenRows
from ppo_core.errors import ModelError, library_errors
from ppo_core.models.backbones import Backbone, DecoderBackbone, EncoderDecoderBackbone, Within
from ppo_core.models.files.model_types import UNTRAINABLE
from ppo_core.models.kernels.fused_linear_loss import FusedLinearLoss, TokenLoss
from ppo_core.models.kernels.matmul_backend import large_matmuls, may_round
from ppo_core.models.kernels.packed_linear import packed
from ppo_core.models.lm_head import ChunkedLMHead

MAX_HEAD_DIFFERENCE = 1e-4
"""Largest allowed relative difference, in fp32, between the logits of `LanguageModel` and the
model's own logits. The limit must be low to detect an unknown soft cap: the logits of an untrained
model are small, so a high cap changes them by little more than the limit."""

MAX_ROUNDED_HEAD_DIFFERENCE = 1e-3
"""Largest allowed relative difference with half-precision weights or with rounded fp32 matmuls."""


@dataclass(frozen=True)
class _LogitRule:
    """Scaling and soft capping that some model families apply to the output of their LM head."""

    scale: float
    softcap: float | None
    vocabulary: int | None
    """Number of logits that the model returns, if its head has more rows."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "_LogitRule":
        """Return the rule that the configuration of a model's text part describes."""
        config = text_config(model.config)
        scales = [getattr(config, name, None) for name in ("logit_scale", "output_multiplier")]
        scale = next(filter(None, scales), None) or 1 / getattr(config, "logits_scaling", 1.0)
        names = "final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap"
        caps = [getattr(config, name, None) for name in names]
        vocabulary = getattr(config, "unpadded_vocab_size", None)
        if vocabulary == config.vocab_size:
            vocabulary = None
        return cls(scale, next(filter(None, caps), None), vocabulary)

    @classmethod
    def identity(cls) -> "_LogitRule":
        return cls(1.0, None, None)

    @property
    def is_identity(self) -> bool:
        return self.scale == 1 and self.softcap is None and self.vocabulary is None

    def apply(self, product: Tensor) -> Tensor:
        """Return the logits (..., V) of the head's matmul output (..., V)."""
        logits = product if self.vocabulary is None else product[..., : self.vocabulary]
        logits = logits if self.scale == 1 else logits * self.scale
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap


class Predictions(NamedTuple):
    """Outputs of the policy for the N counted tokens of a batch."""

    loss: Tensor
    """() summed loss of the tokens."""

    logprobs: Tensor
    """(N,) log-probabilities of the tokens, without a gradient."""

    entropies: Tensor
    """(N,) entropies of the policy, without a gradient."""

    full_kl: Tensor | None
    """(N,) exact KL divergence from the reference, if one was given."""


class LanguageModel(nn.Module):
    """A language model, split into its backbone and its LM head.

    The head (D x V, often the largest matrix) is applied only at counted response positions. It is
    applied in chunks, so that the logits of only one chunk are in memory at a time.
    """

    def __init__(self, model: PreTrainedModel, within: Within = nullcontext) -> None:
        """Wrap a `...ForCausalLM` or `...ForConditionalGeneration`.

        Forward passes run in the context `within()`.

        Raises:
            ModelError: backbone and head do not reproduce the model's own logits, so
                log-probabilities would be wrong.
        """
        super().__init__()
        self.model = model
        self.within = within
        self._rule: _LogitRule
        self.backbone: Backbone
        rounds = model.dtype.itemsize < 4 or may_round(model.device)
        limit = MAX_ROUNDED_HEAD_DIFFERENCE if rounds else MAX_HEAD_DIFFERENCE
        differences = []
        for backbone, rule in self._candidates():
            self.backbone, self._rule = backbone, rule
            differences.append(self._head_difference())
            if differences[-1] <= limit:
                return
        raise ModelError(
            f"{type(model).__name__} is not supported: its logits differ by "
            f"{min(differences):.3g} from hidden states times LM head. It transforms logits in an "
            "unknown way, or is not autoregressive, so log-probabilities would be wrong. Use "
            "another language model, or add the transformation to "
            "ppo_core.models.policy._LogitRule."
        )

    def _candidates(self) -> Iterator[tuple[Backbone, _LogitRule]]:
        """Yield the ways to compute the model's logits, the usual one first."""
        model, within = self.model, self.within
        # Aya Vision ignores the logit scale that its text part's configuration sets.
        for rule in (_LogitRule.of(model), _LogitRule.identity()):
            if model.config.is_encoder_decoder:
                yield EncoderDecoderBackbone(model, within), rule
                continue
            yield DecoderBackbone.of_model(model, within), rule
            # The head may have further layers before its largest matrix.
            yield DecoderBackbone.up_to_head(model, within), rule

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.model.device

    @property
    def head(self) -> nn.Module:
        """Return the module that maps hidden states to logits."""
        return self.model.get_output_embeddings()

    @property
    def pad_token(self) -> int | None:
        """Return the token id that the model treats as padding, or None if it has no such token."""
        return getattr(self.model.get_input_embeddings(), "padding_idx", None)

    @torch.no_grad()
    def _head_difference(self) -> float:
        """Return the largest difference between `logits` and the model's own logits.

        The difference is measured on four tokens, relative to the largest logit, or to 1 if all
        logits are smaller. It is infinite if the vocabularies differ.
        """
        ids = torch.arange(2, 6, device=self.device)[None]
        two = torch.tensor([2], device=self.device)
        rows = TokenRows(
            ids=ids,
            lengths=2 * two,
            prompt_lengths=two,
            row=torch.zeros_like(ids[0, 2:]),
            state=torch.arange(1, 3, device=self.device),
            targets=ids[0, 2:],
        )
        failure = f"{type(self.model).__name__} cannot be run on text alone"
        with self.within(), library_errors(ModelError, failure, "Use another language model."):
            if isinstance(self.backbone, EncoderDecoderBackbone):
                start = torch.full_like(ids[:, :1], self.model.config.decoder_start_token_id)
                decoder_ids = torch.cat([start, ids[:, 2:3]], dim=1)
                expected = self.model(input_ids=ids[:, :2], decoder_input_ids=decoder_ids).logits[0]
            else:
                expected = self.model(input_ids=ids, use_cache=False).logits[0, 1:3]
            if isinstance(self.backbone, DecoderBackbone) and self.model.dtype.itemsize < 4:
                # In half precision, the fast path and the model round the states differently.
                states = self.backbone.hidden_states(ids)[0, 1:3]
            else:
                states = self.backbone.states(rows)
            actual = self.logits(states)
        if actual.shape != expected.shape:
            return math.inf
        difference = (actual - expected).float().abs().max()
        return (difference / expected.float().abs().max().clamp(min=1)).item()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., n, V) of hidden states (..., n, D)."""
        return self._rule.apply(self._product(hidden))

    def logits_of_rows(self, rows: int, passes: int) -> Callable[[Tensor], Tensor]:
        """Return a function from hidden states (b, D) to logits (b, V), where b is up to `rows`.

        The function is `logits`, optimized for `passes` calls, and valid until the weights change.
        """
        full_precision = partial(torch.autocast, "cpu", enabled=False)
        with full_precision():
            head = packed(self.head, rows, passes)
        if head is self.head:
            return self.logits

        def logits(states: Tensor) -> Tensor:
            with full_precision():
                return self._rule.apply(head(states))

        return logits

    def _product(self, states: Tensor) -> Tensor:
        head = cast(nn.Linear, self.head)
        if states.device.type != "cpu":
            with self.within():
                return cast(Tensor, head(states))
        # Autocast is turned off: half precision saves little time in this matmul, and makes the
        # log-probabilities less accurate (MiniMax-M1, arXiv:2506.13585, section 3.2).
        full_precision = torch.autocast("cpu", enabled=False)
        with self.within(), full_precision, large_matmuls(head.in_features * head.out_features):
            return cast(Tensor, head(states))

    def lm_head(self, temperature: float) -> ChunkedLMHead:
        """Return the chunked LM head for next-token distributions at `temperature`."""
        return ChunkedLMHead(
            module=self.head,
            matmul=self._product,
            rule=None if self._rule.is_identity else self._rule.apply,
            temperature=temperature,
        )

    def forward(self, rows: TokenRows, temperature: float) -> tuple[Tensor, Tensor]:
        """Return each counted token's log-probability (N,), and its distribution's entropy (N,).

        The entropy carries no gradient.
        """
        return self.lm_head(temperature).logprobs(self.backbone.states(rows), rows.targets)

    def predict(
        self,
        states: Tensor,
        rows: TokenRows,
        temperature: float,
        token_loss: TokenLoss,
        reference: "LanguageModel | None" = None,
    ) -> Predictions:
        """Return the summed token loss, and predictions for the counted tokens of `rows`.

        `states` (N, D) are the hidden states of the backbone. Gradients flow through the loss and
        the exact KL divergence, which is computed if a `reference` is given.
        """
        head = self.lm_head(temperature)
        if head.is_sharded() or not torch.is_grad_enabled():
            # The fused loss computes all gradients in its forward pass. It needs the weights for
            # both passes at once, but ZeRO-3's hooks gather the weights for one pass at a time.
            logprobs, entropies = head.logprobs(states, rows.targets)
            loss, logprobs = token_loss(logprobs, slice(None)).sum(), logprobs.detach()
        else:
            loss, logprobs, entropies = FusedLinearLoss.apply(  # type: ignore[no-untyped-call]
                states, rows.targets, token_loss, head, *head.module.parameters()
            )
        full_kl = None
        if reference is not None:
            full_kl = self.full_kl(states, reference, rows, temperature)
        return Predictions(loss, logprobs, entropies, full_kl)

    def full_kl(
        self, states: Tensor, reference: "LanguageModel", rows: TokenRows, temperature: float
    ) -> Tensor:
        """Return KL(policy || reference) (N,) over the full vocabulary at each counted token.

        `states` (N, D) are the policy's hidden states. Only the policy receives gradients.
        """
        with torch.no_grad():
            ref_states = reference.backbone.states(rows)
        heads = self.lm_head(temperature), reference.lm_head(temperature)
        return heads[0].divergence(states, heads[1], ref_states)


def require_causal_lm(model: nn.Module, part: str) -> PreTrainedModel:
    """Return the model if it is a language model that can be the policy or the reference.

    Raises:
        ModelError: the model has no LM head, is not a transformers model, or has a model type in
            `UNTRAINABLE`.
    """
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ModelError(
            f"The {part} is a {type(model).__name__}. Pass a transformers causal language model, "
            "with or without a value head. A policy may also be a PeftModel."
        )
    if model.config.model_type in UNTRAINABLE:
        raise ModelError(
            f"The {part} is a {type(model).__name__} (model type {model.config.model_type}): "
            f"{UNTRAINABLE[model.config.model_type]}. Use another language model."
        )
    return model
