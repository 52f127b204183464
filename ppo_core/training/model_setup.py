"""What scripts hand over to the trainer, made into what its loop works with."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.actor_critic import Critic
from ppo_core.models.adapter_weights import merged_copy
from ppo_core.models.adapters import (
    add_adapter,
    check_adapter,
    checkpoint_activations,
    is_peft,
    plain_model,
    using_adapter,
)
from ppo_core.models.policy import LanguageModel
from ppo_core.models.quantization import check_quantized_trainable
from ppo_core.models.reference import create_reference_model
from ppo_core.models.value_head import ModelWithValueHead
from ppo_core.ppo.model_bundle import ModelBundle, reward_holders
from ppo_core.ppo.optimizer import policy_parameters
from ppo_core.ppo.reward_functions import RewardMix

if TYPE_CHECKING:
    from peft import PeftModel


def make_models(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    model: nn.Module,
    ref_model: nn.Module | None,
    rewards: RewardMix,
    value_model: nn.Module | None,
    peft_config: Any,
    engine: Engine,
) -> ModelBundle:
    """The models of a run, from a script's.

    `model` is a causal language model, one with a value head, or a PeftModel. Without a
    `ref_model` the reference is a copy of the policy, or the policy with its adapter off.
    Without a `value_model` the critic is the policy's own value head if it has one or the
    settings ask for it, else starts from the reward model if that reads the policy's tokens,
    else from the policy.

    Raises:
        ModelError: a model cannot play its part, or two parts are the same object.
        ConfigError: the settings and the models contradict each other.
    """
    _refuse_same(model, ref_model, rewards, value_model)
    value_head = None
    if isinstance(model, ModelWithValueHead):
        value_head, model = model.v_head.summary, model.pretrained_model
    if peft_config is not None:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            model = add_adapter(model, peft_config)
    _check_adapter_names(config, model, ref_model)
    disable_dropout(model)
    engine.place(model.eval())
    policy = _make_policy(config, model)
    check_quantized_trainable(model)
    adapted = model if is_peft(model) else None
    critic = _make_critic(config, tokenizer, policy, adapted, value_head, value_model, rewards)
    if not any(parameter.requires_grad for parameter in policy_parameters(policy, critic)):
        raise ModelError("No parameter of the policy requires a gradient: nothing would learn.")
    if not any(parameter.requires_grad for parameter in critic.parameters()):
        raise ModelError("No parameter of the critic requires a gradient: nothing would learn.")
    _train_in_fp32(model, critic)
    disable_dropout(critic)
    if config.gradient_checkpointing:
        _checkpoint_activations(model, critic)
    reference = _make_reference(config, model, ref_model)
    _check_refresh(config, policy, reference)
    frozen = [one for one in reward_holders(rewards, model) if one is not model]
    for scorer in rewards.models():
        if not isinstance(scorer.model, PreTrainedModel):
            scorer.model.eval().to(engine.device)  # a head on the policy's base
    if reference.model is not policy.model:
        frozen.append(reference)
    # Last: a critic may have been copied from a reward model, which is in shards from now on.
    for one in frozen:
        engine.prepare_frozen(one)
    return ModelBundle(
        policy=policy,
        adapted=adapted,
        reference=reference,
        critic=engine.place(critic.eval()),
        rewards=rewards,
    )


def require_loaded(model: object, **others: object) -> None:
    """Refuse what is no model at all, such as a name of one; the others may be None.

    Raises:
        ModelError: one of them is something else.
    """
    given = {"model": model, **{name: one for name, one in others.items() if one is not None}}
    for name, one in given.items():
        if not isinstance(one, nn.Module):
            raise ModelError(
                f"{name}={one!r:.80} is no model. Hand over a loaded one: {name}="
                "AutoModelForCausalLM.from_pretrained(...)."
            )


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: what is learned must be the policy that sampled (detail 8)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Layers of transformers keep theirs as plain numbers, those of peft one by adapter.
        for name in [name for name in vars(module) if "drop" in name]:
            value = getattr(module, name)
            if isinstance(value, float):
                setattr(module, name, 0.0)
            elif isinstance(value, dict):
                setattr(module, name, dict.fromkeys(value, 0.0))


def _train_in_fp32(model: nn.Module, critic: Critic) -> None:
    """Weights that are trained are at least fp32: half precision loses nearly every step.

    The base of an adapter keeps its precision; transformers loads a checkpoint in its own.
    """
    own_backbone = not is_peft(model) or (critic.adapter is None and not _shares(model, critic))
    wholes = [] if is_peft(model) else [model]
    wholes += [critic] if own_backbone else [critic.head]
    for whole in wholes:
        trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
        if any(parameter.itemsize < 4 for parameter in trained):
            whole.float()


def _shares(model: nn.Module, critic: Critic) -> bool:
    of_policy = set(map(id, model.parameters()))
    return any(id(parameter) in of_policy for parameter in critic.parameters())


def _refuse_same(
    model: nn.Module, ref_model: nn.Module | None, rewards: RewardMix, value_model: Any
) -> None:
    if ref_model is not None and _trains(model, ref_model):
        raise ModelError(
            "The policy and the reference are the same object: the KL divergence would stay 0. "
            "Load the reference apart, or hand over ref_model=None."
        )
    trained = [one for one in (model, value_model) if one is not None]
    for scorer in rewards.models():
        if any(_trains(one, scorer.model) for one in trained):
            raise ModelError(
                "The reward model is the same object as a model that is trained: its scores would "
                "move. Load it apart, or hand over value_model=None."
            )


def _trains(model: nn.Module, other: nn.Module) -> bool:
    """Whether training the one moves the other; layers that both keep frozen may be shared."""
    moving = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return model is other or any(id(parameter) in moving for parameter in other.parameters())


def _check_adapter_names(config: PPOConfig, model: nn.Module, ref_model: nn.Module | None) -> None:
    names = {
        name: getattr(config, name)
        for name in ("model_adapter_name", "ref_adapter_name")
        if getattr(config, name) is not None
    }
    if names and not is_peft(model):
        raise ConfigError(
            f"{', '.join(names)} is set, and the policy is a {type(model).__name__} without "
            "adapters. Hand over a PeftModel or a peft_config, or leave the names away."
        )
    if is_peft(model):
        for name in names.values():
            check_adapter(model, name)
    if config.ref_adapter_name is not None and ref_model is not None:
        raise ConfigError(
            f"ref_adapter_name={config.ref_adapter_name!r} and a ref_model both say what the "
            "reference is. Hand over ref_model=None."
        )


def _make_policy(config: PPOConfig, model: nn.Module) -> LanguageModel:
    if not is_peft(model):
        return LanguageModel(_transformers_model(model, "policy"))
    if config.model_adapter_name is not None:
        _activate(model, config.model_adapter_name)
    if config.ref_adapter_name is not None:
        model.set_requires_grad(config.ref_adapter_name, requires_grad=False)
    name = model.active_adapter
    base = _transformers_model(plain_model(model), "policy")
    return LanguageModel(base, within=partial(using_adapter, model, name))


def _activate(model: "PeftModel", name: str) -> None:
    """Make an adapter the one that is trained and saved."""
    before = model.active_adapter
    others = [
        parameter
        for where, parameter in model.named_parameters()
        if parameter.requires_grad and f".{before}." not in where
    ]
    model.set_adapter(name)
    # PEFT freezes all others with that, also the critic's.
    for parameter in others:
        parameter.requires_grad_(True)


def _make_reference(
    config: PPOConfig, model: nn.Module, ref_model: nn.Module | None
) -> LanguageModel:
    if ref_model is None and is_peft(model):
        off = partial(using_adapter, model, config.ref_adapter_name)
        return LanguageModel(plain_model(model), within=off)
    if ref_model is None:
        ref_model = create_reference_model(model)
    if isinstance(ref_model, ModelWithValueHead):
        ref_model = ref_model.pretrained_model
    return LanguageModel(_transformers_model(ref_model, "reference").eval())


def _check_refresh(config: PPOConfig, policy: LanguageModel, reference: LanguageModel) -> None:
    """Refuse to copy the policy into a reference that cannot take it."""
    if not config.reference_refresh_updates:
        return
    shapes = [
        {name: parameter.shape for name, parameter in model.named_parameters()}
        for model in (policy, reference)
    ]
    if policy.model is reference.model or shapes[0] != shapes[1]:
        raise ConfigError(
            f"reference_refresh_updates={config.reference_refresh_updates} copies the policy into "
            "the reference, which has no weights of its own or others than the policy has. Train "
            "without an adapter and with ref_model=None, or leave the setting away."
        )


def _make_critic(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    policy: LanguageModel,
    adapted: "PeftModel | None",
    value_head: nn.Linear | None,
    value_model: nn.Module | None,
    rewards: RewardMix,
) -> Critic:
    if value_model is not None and config.shared_critic:
        raise ConfigError(
            "shared_critic=True and a value_model both say what the critic is. Hand over "
            "value_model=None."
        )
    if isinstance(value_model, Critic):
        return value_model
    if value_model is not None:
        return Critic.from_classifier(value_model)
    if value_head is not None or config.shared_critic:
        return Critic.on_policy(policy, value_head)
    for reward_model in rewards.models():
        has_its_own_base = isinstance(reward_model.model, PreTrainedModel)
        reads_along = reward_model.lm_head is not None and has_its_own_base
        if reads_along and reward_model.reads_tokens_of(tokenizer):
            return Critic.from_reward_model(reward_model)
    return Critic.from_policy(policy.model if adapted is None else merged_copy(adapted))


def _checkpoint_activations(model: nn.Module, critic: Critic) -> None:
    """Of policy and critic; it acts in training mode, which the update switches on."""
    if is_peft(model):
        checkpoint_activations(model)
    backbones = [plain_model(model), critic.model]
    for backbone in backbones[is_peft(model) :]:
        if isinstance(backbone, PreTrainedModel) and not backbone.is_activation_checkpointing:
            backbone.activation_checkpointing_enable({"use_reentrant": False})


def _transformers_model(model: nn.Module, part: str) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ModelError(
            f"The {part} is a {type(model).__name__}; it must be a causal language model of "
            "transformers, one with a value head, or, for a policy, a PeftModel of one."
        )
    return model
