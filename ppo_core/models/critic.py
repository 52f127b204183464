"""Make the critic from a reward model, a policy or an adapter; train it with the policy."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_core.algorithm.temperature import at_least_fp32
from ppo_core.data.types import TokenRows
from ppo_core.errors import ModelError
from ppo_core.models.adapters import (
    CRITIC_ADAPTER,
    check_adapter,
    is_peft,
    plain_model,
    using_adapter,
)
from ppo_core.models.backbones import Backbone, DecoderBackbone, Within
from ppo_core.models.kernels.fused_linear_loss import TokenLoss
from ppo_core.models.model_with_value_head import ModelWithValueHead
from ppo_core.models.policy import LanguageModel, Predictions
from ppo_core.models.reward_model import RewardModel
from ppo_core.models.script_modules import (
    ModuleBackbone,
    has_backbone_and_score,
    has_own_score,
    hidden_states,
    is_pointwise,
    token_scores,
    token_values,
)

if TYPE_CHECKING:
    from peft import PeftModel


class Critic(nn.Module):
    """A backbone and a head that predict the return from the hidden state before each token."""

    def __init__(
        self, backbone: Backbone | ModuleBackbone, head: nn.Module, *, adapter: str | None = None
    ) -> None:
        """Wrap a backbone, which may be the policy's, and a head; both are trained in place.

        `adapter` names the critic's own adapter on the policy's base, if there is one.

        Raises:
            ModelError: the head is a linear layer with several outputs.
        """
        super().__init__()
        if (outputs := getattr(head, "out_features", 1)) != 1:
            raise ModelError(
                f"The value model gives {outputs} values for each token, but must give one. Make "
                "its head with one output (num_labels=1)."
            )
        self.backbone = backbone
        self.model = backbone.module
        self.head = head
        self.adapter = adapter

    @classmethod
    def from_classifier(cls, model: nn.Module) -> "Critic":
        """Return a critic that trains a sequence classifier in place; its scores are the values.

        Raises:
            ModelError: the model has no linear layer `score` with a single output.
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
    def from_module(cls, model: nn.Module) -> "Critic":
        """Return a critic that trains the value model of a script in place.

        The value model is a `...ForSequenceClassification` with or without an adapter, a model
        with a value head, a module with a backbone and a `score` (see `has_backbone_and_score`),
        or a module that returns one value for each token.

        Raises:
            ModelError: see `from_classifier`; or an adapter of the model is not supported.
        """
        if is_peft(model):
            return cls._from_adapted(model)
        if isinstance(model, ModelWithValueHead):
            own = model.pretrained_model
            return cls(DecoderBackbone.of_model(plain_model(own), _own_adapter(own)), model.v_head)
        if isinstance(model, PreTrainedModel) and not has_own_score(model):
            return cls.from_classifier(model)
        if not has_backbone_and_score(model):
            return cls(ModuleBackbone(model, token_values), nn.Identity())
        if not is_pointwise(model.score):
            return cls(ModuleBackbone(model, token_scores), nn.Identity())
        own = getattr(model, str(model.base_model_prefix))
        return cls(_own_backbone(own), cast(nn.Module, model.score))

    @classmethod
    def _from_adapted(cls, model: "PeftModel") -> "Critic":
        """Return a critic on a classifier with an adapter; PEFT chose the trainable parameters."""
        classifier = plain_model(model)
        score = getattr(classifier, "score", None)
        if not isinstance(score, nn.Module):
            raise ModelError(
                f"The value model, a {type(classifier).__name__} with an adapter, has no `score` "
                "for each token. Use a decoder-only ...ForSequenceClassification with "
                "num_labels=1, or value_model=None."
            )
        return cls(DecoderBackbone(classifier.base_model, _own_adapter(model)), score)

    @classmethod
    def from_reward_model(cls, reward_model: RewardModel) -> "Critic":
        """Return a critic that begins as a copy of the reward model.

        The initial value of a state is the reward model's score of the text up to that state.
        """
        critic = cls.from_classifier(copy.deepcopy(reward_model.model).requires_grad_(True))
        score = cast(nn.Linear, critic.head)
        critic.head = head = nn.Linear(score.in_features, 1).to(score.weight)
        with torch.no_grad():
            head.weight.copy_(score.weight * reward_model.gain)
            head.bias.fill_(-reward_model.bias)
            if score.bias is not None:
                head.bias.add_(score.bias)
            head.bias.mul_(reward_model.gain)
        return critic

    @classmethod
    def from_policy(cls, policy: PreTrainedModel) -> "Critic":
        """Return a critic on a copy of the policy's backbone; a zero head makes all values 0."""
        if policy.base_model is policy:
            copied = copy.deepcopy(policy).requires_grad_(True)
            copied.get_output_embeddings().requires_grad_(False)
            backbone = DecoderBackbone.of_model(copied)
        else:
            backbone = DecoderBackbone(copy.deepcopy(policy.base_model).requires_grad_(True))
        return cls(backbone, _zero_head(backbone))

    @classmethod
    def on_policy(cls, policy: LanguageModel, head: nn.Linear | None = None) -> "Critic":
        """Return a critic on the policy's backbone, with the given head or a zero head."""
        return cls(policy.backbone, _zero_head(policy.backbone) if head is None else head)

    @classmethod
    def on_adapter(cls, model: "PeftModel", name: str = CRITIC_ADAPTER) -> "Critic":
        """Return a critic with a zero head on a PeftModel's base with the adapter `name`.

        Raises:
            ModelError: there is no adapter of this name.
        """
        check_adapter(model, name)
        base = plain_model(model)
        backbone = DecoderBackbone.of_model(base, within=partial(using_adapter, model, name))
        return cls(backbone, _zero_head(backbone), adapter=name)

    def forward(self, rows: TokenRows) -> Tensor:
        """Return values (N,) of the states from which the counted tokens were sampled."""
        return self.values(self.backbone.states(rows))

    def values(self, states: Tensor) -> Tensor:
        """Return values (N,) of hidden states (N, D)."""
        weight = next(self.head.parameters(), states)
        values: Tensor = self.head(states.to(weight.dtype))
        # FSDP2 registers hooks on a module's output, so the output must not be a view.
        return at_least_fp32(values[:, 0]).clone()


def _own_backbone(own: nn.Module) -> Backbone | ModuleBackbone:
    """Return the backbone of a script's value model, which may also have an LM head."""
    if not isinstance(own, PreTrainedModel):
        return ModuleBackbone(own, hidden_states)
    has_head = own.get_output_embeddings() is not None
    return DecoderBackbone.of_model(own) if has_head else DecoderBackbone(own)


def _own_adapter(model: nn.Module) -> Within:
    """Return a function that returns a context in which the present adapter is active.

    Without an adapter, return `nullcontext`.
    """
    return partial(using_adapter, model, model.active_adapter) if is_peft(model) else nullcontext


def _zero_head(backbone: Backbone) -> nn.Linear:
    device = next(backbone.module.parameters()).device
    head = nn.Linear(backbone.width(), 1).to(device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class ActorCritic(nn.Module):
    """Policy and critic as one module, so that one engine shards and trains both."""

    def __init__(self, policy: LanguageModel, critic: Critic | None) -> None:
        """Wrap policy and critic, which may share a backbone; both are trained in place.

        Without a critic, only the policy is trained.
        """
        super().__init__()
        self.policy = policy
        self.critic = critic

    @property
    def shares_backbone(self) -> bool:
        """Return whether the critic is a head on the policy's backbone."""
        return self.critic is not None and self.critic.backbone is self.policy.backbone

    @property
    def shares_nothing(self) -> bool:
        """Return whether policy and critic have no parameter in common, trained or frozen."""
        of_critic = () if self.critic is None else self.critic.parameters()
        return set(self.policy.parameters()).isdisjoint(of_critic)

    def forward(
        self,
        rows: TokenRows,
        temperature: float,
        token_loss: TokenLoss,
        reference: LanguageModel | None = None,
    ) -> tuple[Predictions, Tensor | None]:
        """Return the policy's predictions for the counted tokens, and the critic's values (N,).

        Without a critic, the values are None. With a `reference`, predictions include the exact KL
        divergence from it.
        """
        states = self.policy.backbone.states(rows)
        predicted = self.policy.predict(states, rows, temperature, token_loss, reference)
        if self.critic is None:
            return predicted, None
        return predicted, self.critic.values(states) if self.shares_backbone else self.critic(rows)
