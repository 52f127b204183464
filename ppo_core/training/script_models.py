"""The models that a script passes to a run, and the checks that refuse them."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.adapters import check_adapter, is_peft
from ppo_core.models.critic import Critic
from ppo_core.models.model_with_value_head import ModelWithValueHead
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.optimizer import policy_parameters
from ppo_core.ppo.rewards import RewardMix


@dataclass(frozen=True)
class ScriptModels:
    """The models of a run as a script passes them."""

    policy: nn.Module
    """A causal language model, with or without a value head, or a PeftModel."""

    reference: nn.Module | None
    """The reference. If None, the reference is a copy of the policy. For a policy with an adapter,
    it is instead the base model with the adapter `ref_adapter_name`, or without an adapter."""

    critic: nn.Module | None
    """The critic. If None, the run has the first of these that is possible: the policy's own value
    head; with `shared_critic`, a new head on the policy; the policy's base with its adapter
    CRITIC_ADAPTER; a copy of a reward model that reads the policy's tokens; a copy of the policy.
    If the advantages need no critic, the run has none."""

    rewards: RewardMix
    peft_config: Any = None
    """The adapter to add to the policy, if any."""


def require_loaded(model: object, **others: object) -> None:
    """Raise if an argument is not a loaded model; arguments in `others` may also be None.

    Raises:
        ModelError: an argument is not a model, but for example the name of a model.
    """
    given = {"model": model, **{name: one for name, one in others.items() if one is not None}}
    for name, one in given.items():
        if not isinstance(one, nn.Module):
            kind = "SequenceClassification" if name == "value_model" else "CausalLM"
            raise ModelError(
                f"{name}={one!r:.80} is not a loaded model. Pass {name}="
                f"AutoModelFor{kind}.from_pretrained(...)."
            )


def refuse_same(given: ScriptModels) -> None:
    """Raise if training the policy or the critic would change the reference or a reward model.

    Raises:
        ModelError: two of these models are the same object, or share layers that are trained.
    """
    if given.reference is not None and _trains(given.policy, given.reference):
        raise ModelError(
            "The policy and the reference are the same object: the KL divergence would stay 0. "
            "Load the reference separately, or pass ref_model=None."
        )
    trained = [one for one in (given.policy, given.critic) if one is not None]
    scorers = [scorer.model for scorer in given.rewards.models()]
    for scorer in (*scorers, *given.rewards.modules()):
        if any(_trains(one, scorer) for one in trained):
            raise ModelError(
                "The reward model is the same object as a model that is trained: its scores would "
                "change. Load it separately, or pass value_model=None."
            )


def _trains(model: nn.Module, other: nn.Module) -> bool:
    """Return whether training `model` changes `other`; frozen layers may be shared."""
    moving = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return model is other or any(id(parameter) in moving for parameter in other.parameters())


def check_adapter_names(config: PPOConfig, model: nn.Module, ref_model: nn.Module | None) -> None:
    """Raise if the settings name adapters that the policy does not have.

    Raises:
        ConfigError: the policy lacks the adapter, or ref_adapter_name is given beside a reference.
    """
    names = {
        name: getattr(config, name)
        for name in ("model_adapter_name", "ref_adapter_name")
        if getattr(config, name) is not None
    }
    if names and not is_peft(model):
        raise ConfigError(
            f"{', '.join(names)} is set, and the policy is a {type(model).__name__} without "
            "adapters. Pass a PeftModel or a peft_config, or remove these settings."
        )
    if is_peft(model):
        for name in names.values():
            check_adapter(model, name)
    if config.ref_adapter_name is not None and ref_model is not None:
        raise ConfigError(
            f"ref_adapter_name={config.ref_adapter_name!r} and ref_model both set the reference. "
            "Pass ref_model=None."
        )


def require_trainable(policy: LanguageModel, critic: Critic | None) -> None:
    """Raise if the policy or the critic would learn nothing.

    Raises:
        ModelError: no parameter of the model requires a gradient.
    """
    models = {"policy": policy_parameters(policy, critic)}
    if critic is not None:
        models["critic"] = [*critic.parameters()]
    for name, parameters in models.items():
        if not any(parameter.requires_grad for parameter in parameters):
            raise ModelError(
                f"No parameter of the {name} requires a gradient, so the {name} would not learn. "
                "Call requires_grad_() of the model, or of the layers to train."
            )


def check_refresh(config: PPOConfig, policy: LanguageModel, reference: LanguageModel) -> None:
    """Raise if the settings refresh a reference that cannot take the policy's weights.

    Raises:
        ConfigError: the reference shares the policy's weights, or has other parameters.
    """
    if not config.reference_refresh_updates:
        return
    shapes = [
        {name: parameter.shape for name, parameter in model.named_parameters()}
        for model in (policy, reference)
    ]
    if policy.model is reference.model or shapes[0] != shapes[1]:
        raise ConfigError(
            f"reference_refresh_updates={config.reference_refresh_updates} copies the policy into "
            "the reference, but this reference shares the policy's weights or has other "
            "parameters. Train without an adapter and with ref_model=None, or remove the setting."
        )


def refuse_critic(config: PPOConfig, given: ScriptModels) -> None:
    """Raise if a critic is given, and the advantages of the settings need none.

    Raises:
        ConfigError: there is a value model, or a value head on the policy.
    """
    for what, is_given in (
        ("a value_model", given.critic is not None),
        ("a policy with a value head", isinstance(given.policy, ModelWithValueHead)),
    ):
        if is_given:
            raise ConfigError(
                f"advantage_estimator={config.advantage_estimator!r} trains no critic, and the run "
                f"has {what}, which would not be trained. Pass value_model=None, and the policy's "
                "pretrained_model as the policy, or set advantage_estimator='gae'."
            )
