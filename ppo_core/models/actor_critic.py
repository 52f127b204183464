"""Policy, reference and critic."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_core.algorithm.masking import at_least_fp32
from ppo_core.data.types import TokenRows
from ppo_core.errors import ModelError
from ppo_core.models.adapters import check_adapter, plain_model, using_adapter
from ppo_core.models.backbones import Backbone, DecoderBackbone, EncoderDecoderBackbone, Within
from ppo_core.models.kernels.fused_linear_loss import TokenLoss
from ppo_core.models.kernels.matmul_backend import large_matmuls
from ppo_core.models.kernels.packed_linear import packed
from ppo_core.models.lm_head import ChunkedLMHead
from ppo_core.models.reward_model import RewardModel

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class _LogitRule:
    """What a family does with its logits behind the head."""

    scale: float
    softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "_LogitRule":
        config = model.config
        scale = getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(scale, softcap)

    @property
    def is_identity(self) -> bool:
        """Whether logits are the head's product itself."""
        return self.scale == 1 and self.softcap is None

    def apply(self, product: Tensor) -> Tensor:
        """Logits of the head's product with hidden states."""
        logits = product if self.scale == 1 else product * self.scale
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap


class LanguageModel(nn.Module):
    """A language model, split into its backbone and its head.

    The head (D x V, often the largest matrix) is applied to counted response positions alone
    and in chunks, so that no (tokens, V) tensor outlives its chunk.
    """

    def __init__(self, model: PreTrainedModel, within: Within = nullcontext) -> None:
        """Wrap a `...ForCausalLM` or `...ForConditionalGeneration`; it runs inside `within()`.

        Raises:
            ModelError: its logits are not what backbone and head give, so a log-probability
                computed from them would belong to another model.
        """
        super().__init__()
        self.model = model
        self.within = within
        self.backbone: Backbone = (
            EncoderDecoderBackbone(model, within)
            if model.config.is_encoder_decoder
            else DecoderBackbone(model.base_model, within)
        )
        self._rule = _LogitRule.of(model)
        with within():
            self._check_head()

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.model.device

    @property
    def head(self) -> nn.Module:
        """The matrix from hidden states to logits."""
        return self.model.get_output_embeddings()

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare with the model's own logits on a prompt and a response of two tokens each."""
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
        if isinstance(self.backbone, EncoderDecoderBackbone):
            start = torch.full_like(ids[:, :1], self.model.config.decoder_start_token_id)
            decoder_ids = torch.cat([start, ids[:, 2:3]], dim=1)
            expected = self.model(input_ids=ids[:, :2], decoder_input_ids=decoder_ids).logits[0]
        else:
            expected = self.model(input_ids=ids, use_cache=False).logits[0, 1:3]
        actual = self.logits(self.backbone.states(rows))
        difference = (actual - expected).float().abs().max().item()
        if not difference <= 1e-3 * max(1.0, expected.float().abs().max().item()):
            raise ModelError(
                f"{type(self.model).__name__} changes its logits after the head in a way unknown "
                f"here (they differ by {difference:.3g}): log-probabilities would be wrong. "
                "Its rule belongs into ppo_core.models.actor_critic._LogitRule."
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., n, V) of hidden states (..., n, D)."""
        return self._rule.apply(self._product(hidden))

    def logits_of_rows(self, rows: int, passes: int) -> Callable[[Tensor], Tensor]:
        """`logits` for so many passes of up to so many states (b, D), while the weights stay."""
        whole = partial(torch.autocast, "cpu", enabled=False)
        with whole():
            head = packed(self.head, rows, passes)
        if head is self.head:
            return self.logits

        def logits(states: Tensor) -> Tensor:
            with whole():
                return self._rule.apply(head(states))

        return logits

    def _product(self, states: Tensor) -> Tensor:
        head = cast(nn.Linear, self.head)
        if states.device.type != "cpu":
            with self.within():
                return cast(Tensor, head(states))
        # In the precision of the weights also under autocast: half of it gains little here, and
        # costs the log-probabilities digits (MiniMax-M1, arXiv:2506.13585, 3.2).
        whole = torch.autocast("cpu", enabled=False)
        with self.within(), whole, large_matmuls(head.in_features * head.out_features):
            return cast(Tensor, head(states))

    def lm_head(self, temperature: float) -> ChunkedLMHead:
        """The head as it makes distributions at a temperature, a chunk of states at a time."""
        return ChunkedLMHead(
            module=self.head,
            matmul=self._product,
            rule=None if self._rule.is_identity else self._rule.apply,
            temperature=temperature,
        )

    def forward(self, rows: TokenRows, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability of each counted token, and entropy of the policy there: (N,), (N,).

        The entropy carries no gradient.
        """
        return self.lm_head(temperature).logprobs(self.backbone.states(rows), rows.targets)

    def full_kl(
        self, states: Tensor, reference: "LanguageModel", rows: TokenRows, temperature: float
    ) -> Tensor:
        """KL(policy || reference) (N,) over the whole vocabulary at each counted token.

        `states` (N, D) are the policy's; the gradient flows into the policy alone.
        """
        with torch.no_grad():
            ref_states = reference.backbone.states(rows)
        heads = self.lm_head(temperature), reference.lm_head(temperature)
        return heads[0].divergence(states, heads[1], ref_states)


class Critic(nn.Module):
    """A backbone and a linear head: the expected return of the state before each token."""

    def __init__(self, backbone: Backbone, head: nn.Linear, *, adapter: str | None = None) -> None:
        """Take the backbone, its own or the policy's, and the head; both are trained in place.

        `adapter` names the adapter of its own that it has on the policy's base, if it has one.
        """
        super().__init__()
        self.backbone = backbone
        self.model = backbone.module
        self.head = head
        self.adapter = adapter

    @classmethod
    def from_classifier(cls, model: nn.Module) -> "Critic":
        """A `...ForSequenceClassification` with one label, trained in place: value = score.

        Raises:
            ModelError: it scores whole texts only, or has several labels.
        """
        score = getattr(model, "score", None)
        if not isinstance(score, nn.Linear) or score.out_features != 1:
            raise ModelError(
                f"{type(model).__name__} does not give one value at every token, as a critic "
                "must. Use a decoder-only ...ForSequenceClassification with num_labels=1, or "
                "value_model=None."
            )
        return cls(DecoderBackbone(cast(nn.Module, model.base_model)), score)

    @classmethod
    def from_reward_model(cls, reward_model: RewardModel) -> "Critic":
        """A copy of the reward model: it starts as the score of the response so far."""
        critic = cls.from_classifier(copy.deepcopy(reward_model.model).requires_grad_(True))
        score = critic.head
        critic.head = nn.Linear(score.in_features, 1).to(score.weight)
        with torch.no_grad():
            critic.head.weight.copy_(score.weight * reward_model.gain)
            critic.head.bias.fill_(-reward_model.bias)
            if score.bias is not None:
                critic.head.bias.add_(score.bias)
            critic.head.bias.mul_(reward_model.gain)
        return critic

    @classmethod
    def from_policy(cls, policy: PreTrainedModel) -> "Critic":
        """A copy of the policy's backbone with a head of zeros: it starts by expecting 0."""
        backbone = DecoderBackbone(copy.deepcopy(policy.base_model).requires_grad_(True))
        return cls(backbone, _zero_head(policy))

    @classmethod
    def on_policy(cls, policy: LanguageModel, head: nn.Linear | None = None) -> "Critic":
        """A value head on the policy's own backbone; without one, it starts by expecting 0."""
        return cls(policy.backbone, _zero_head(policy.model) if head is None else head)

    @classmethod
    def on_adapter(cls, model: "PeftModel", name: str = "critic") -> "Critic":
        """A value head on the base of a PeftModel under an adapter of the critic's own.

        Raises:
            ModelError: there is no adapter of this name.
        """
        check_adapter(model, name)
        base = plain_model(model)
        backbone = DecoderBackbone(base.base_model, within=partial(using_adapter, model, name))
        return cls(backbone, _zero_head(base), adapter=name)

    def forward(self, rows: TokenRows) -> Tensor:
        """Values (N,) of the states in which the counted tokens were sampled."""
        return self.values(self.backbone.states(rows))

    def values(self, states: Tensor) -> Tensor:
        """Values (N,) of hidden states (N, D)."""
        values: Tensor = self.head(states.to(self.head.weight.dtype))
        # A copy: FSDP2 hooks itself to what a module returns, and cannot where that is a view.
        return at_least_fp32(values[:, 0]).clone()


def _zero_head(policy: PreTrainedModel) -> nn.Linear:
    head = nn.Linear(policy.config.get_text_config().hidden_size, 1).to(policy.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class Predictions(NamedTuple):
    """What the policy says about the N counted tokens of some rows."""

    loss: Tensor
    """() summed loss of its log-probabilities."""

    logprobs: Tensor
    """(N,) log-probabilities, without a gradient."""

    entropies: Tensor
    """(N,) its entropy, without a gradient."""

    full_kl: Tensor | None
    """(N,) exact divergence from the reference, if one was handed in."""


class ActorCritic(nn.Module):
    """Policy and critic as one module, so that one engine can shard and train both."""

    def __init__(self, policy: LanguageModel, critic: Critic) -> None:
        """Take both, which are trained in place; they may share their backbone."""
        super().__init__()
        self.policy = policy
        self.critic = critic

    @property
    def shares_backbone(self) -> bool:
        """Whether the critic is a head on the policy's states."""
        return self.critic.backbone is self.policy.backbone

    @property
    def shares_nothing(self) -> bool:
        """Whether policy and critic have no weight in common, trained or not."""
        return set(self.policy.parameters()).isdisjoint(self.critic.parameters())

    def forward(
        self,
        rows: TokenRows,
        temperature: float,
        token_loss: TokenLoss,
        reference: LanguageModel | None = None,
    ) -> tuple[Predictions, Tensor]:
        """Of the counted tokens: what the policy says, and the critic's values (N,).

        With a `reference`, the exact divergence too.
        """
        states = self.policy.backbone.states(rows)
        predicted = self._of_states(states, rows, temperature, token_loss, reference)
        return predicted, self.critic.values(states) if self.shares_backbone else self.critic(rows)

    def of_policy(
        self,
        rows: TokenRows,
        temperature: float,
        token_loss: TokenLoss,
        reference: LanguageModel | None = None,
    ) -> Predictions:
        """What the policy says alone: with `critic`, the two halves of a whole pass."""
        states = self.policy.backbone.states(rows)
        return self._of_states(states, rows, temperature, token_loss, reference)

    def _of_states(
        self,
        states: Tensor,
        rows: TokenRows,
        temperature: float,
        token_loss: TokenLoss,
        reference: LanguageModel | None,
    ) -> Predictions:
        head = self.policy.lm_head(temperature)
        loss, logprobs, entropies = head.loss(states, rows.targets, token_loss)
        full_kl = None
        if reference is not None:
            full_kl = self.policy.full_kl(states, reference, rows, temperature)
        return Predictions(loss, logprobs, entropies, full_kl)
