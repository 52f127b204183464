"""Make policy, reference, critic and rewards of a run from the models that a script passes."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.checkpointing.fingerprint import Layout, fingerprint, layout
from ppo_core.checkpointing.ppo_fingerprint import given_models
from ppo_core.config.placement import is_fast_in_bf16
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.text_config import text_config
from ppo_core.distributed.choose_engine import choose_engine
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.adapters import (
    CRITIC_ADAPTER,
    adapter_settings,
    add_adapter,
    checkpoint_activations,
    is_peft,
    plain_model,
    recompute_activations,
    using_adapter,
)
from ppo_core.models.backbones import freeze_unread_parts
from ppo_core.models.critic import ActorCritic, Critic
from ppo_core.models.files.merge_adapter import merged_copy
from ppo_core.models.model_with_value_head import ModelWithValueHead
from ppo_core.models.policy import LanguageModel, require_causal_lm
from ppo_core.models.quantization import check_quantized_trainable, keep_differentiable
from ppo_core.models.reference import make_reference
from ppo_core.ppo.model_bundle import ModelBundle, reward_holders
from ppo_core.ppo.rewards import RewardMix, make_rewards
from ppo_core.ppo.schedule import batch_sizes
from ppo_core.training.script_models import (
    ScriptModels,
    check_adapter_names,
    check_refresh,
    refuse_critic,
    refuse_same,
    require_trainable,
)

if TYPE_CHECKING:
    from peft import PeftModel


logger = logging.getLogger(__name__)


def join_processes(
    config: PPOConfig, policy: nn.Module, peft_config: Any = None
) -> tuple[PPOConfig, Engine]:
    """Return the settings with precision and batch sizes filled in, and the engine of the run.

    `peft_config` is the adapter that the policy will get, if any.

    Raises:
        ConfigError: the settings contradict each other, the launcher, or the number of processes.
        TrainingError: the processes cannot be connected.
    """
    in_bf16 = trains_in_bf16(
        config.bf16, policy, use_cpu=config.use_cpu, adds_adapter=peft_config is not None
    )
    engine = choose_engine(
        # An automatic False becomes None: only a False in the settings contradicts a launcher that
        # sets bf16.
        bf16=in_bf16 or config.bf16,
        use_cpu=config.use_cpu,
        sharding=config.sharding,
        offload=config.offload,
        deepspeed=config.deepspeed,
        gather_for_generation=config.ds3_gather_for_generation,
        timeout=config.ddp_timeout,
    )
    sizes = batch_sizes(config, engine.num_processes)
    return replace(config, bf16=engine.computes_in_bf16, **vars(sizes)), engine


def trains_in_bf16(
    asked: bool | None, model: nn.Module, *, use_cpu: bool, adds_adapter: bool = False
) -> bool:
    """Return `asked`; if it is None, whether bfloat16 autocast is fast on this machine.

    If `asked` is None, there is no autocast for float64 weights, and none if the policy has or
    gets an adapter and its base is in half precision: the base already computes in this precision.
    All other weights are trained in fp32, whatever the precision of their files.
    """
    if asked is not None:
        return asked
    precisions = {parameter.dtype for parameter in model.parameters()}
    keeps_precision = adds_adapter or any(map(is_peft, model.modules()))
    if torch.float64 in precisions or (keeps_precision and precisions != {torch.float32}):
        return False
    # A model without a configured width counts as width 0; a later check refuses such a model.
    config = getattr(model, "config", None)
    width = 0 if config is None else getattr(text_config(config), "hidden_size", 0)
    return is_fast_in_bf16(width, use_cpu=use_cpu)


def set_up_models(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    *,
    policy: nn.Module,
    reference: nn.Module | None = None,
    critic: nn.Module | None = None,
    reward: Any,
    peft_config: Any = None,
) -> ModelBundle:
    """Make the models of a run from loaded models and rewards, with their fingerprints.

    For the models see `ScriptModels`, and for `reward` see `make_rewards`.

    Raises:
        ModelError: a model does not fit its role, one object has two roles, or the models differ
            between the processes.
        ConfigError: the settings and the models contradict each other.
    """
    rewards = make_rewards(
        reward,
        tokenizer,
        batch_size=config.local_rollout_forward_batch_size,
        weights=config.reward_weights,
        equal_passes=engine.requires_equal_passes(),
    )
    given = ScriptModels(policy, reference, critic, rewards, peft_config)
    share_random_scores([*(scorer.model for scorer in rewards.models()), critic], engine)
    prints = given_models(
        policy, reference, rewards.models(), rewards.modules(), adds_adapter=peft_config is not None
    )
    require_equal_models(prints, engine)
    models = make_models(config, tokenizer, given, engine)
    return replace(models, fingerprints=prints | trained_layouts(models))


def make_models(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, given: ScriptModels, engine: Engine
) -> ModelBundle:
    """Make policy, reference, critic and rewards of a run from a script's models.

    Raises:
        ModelError: a model does not fit its role, or one object has two roles.
        ConfigError: the settings and the models contradict each other.
    """
    refuse_same(given)
    model, value_head = _prepared_policy(config, given)
    disable_dropout(model)
    keep_differentiable(model)
    engine.place(model.eval())
    policy = _make_policy(config, model)
    check_quantized_trainable(model)
    adapted = model if is_peft(model) else None
    saved_dtype = _saved_dtype(given.policy, policy)
    critic = _make_critic(config, tokenizer, policy, adapted, value_head, given)
    require_trainable(policy, critic)
    for trained in (model, critic):
        if trained is not None:
            freeze_unread_parts(trained)
    _train_in_fp32(model, critic)
    if given.reference is not None and _shares(model, given.reference):
        # Give the reference's own layers the precision of the layers that it shares.
        given.reference.to(policy.model.dtype)
    if critic is not None:
        disable_dropout(critic)
    if config.gradient_checkpointing:
        _checkpoint_activations(model, critic)
    reference = make_reference(model, given.reference, adapter=config.ref_adapter_name)
    check_refresh(config, policy, reference)
    # Shard reward models last, because making the critic may copy an unsharded reward model.
    _prepare_frozen(engine, model, policy, reference, given.rewards)
    return ModelBundle(
        policy=policy,
        adapted=adapted,
        saved_dtype=saved_dtype,
        reference=reference,
        critic=None if critic is None else engine.place(critic.eval()),
        rewards=given.rewards,
    )


def _saved_dtype(given: nn.Module, policy: LanguageModel) -> torch.dtype:
    """Return the precision for saving the policy; a model with a value head also stores it."""
    if not isinstance(given, ModelWithValueHead):
        return policy.model.dtype
    if given.saved_dtype is None:
        given.saved_dtype = policy.model.dtype
    return given.saved_dtype


def trained_layouts(models: ModelBundle) -> dict[str, Layout]:
    """Return the shapes of the trained models, and an adapter's settings, for the fingerprint.

    Call this before the engine prepares policy and critic: afterwards, a process may have only
    shards.
    """
    layouts = {"policy or critic": layout(ActorCritic(models.policy, models.critic))}
    if models.adapted is not None:
        layouts["adapter"] = adapter_settings(
            models.adapted.peft_config[models.adapted.active_adapter]
        )
    return layouts


def _prepared_policy(config: PPOConfig, given: ScriptModels) -> tuple[nn.Module, nn.Linear | None]:
    """Return the policy with the adapter of `peft_config`, if any, and its value head or None."""
    model, value_head = given.policy, None
    if isinstance(model, ModelWithValueHead):
        value_head, model = model.v_head.summary, model.pretrained_model
    if given.peft_config is not None:
        model = _without_adapter(model)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            model = add_adapter(model, given.peft_config)
    check_adapter_names(config, model, given.reference)
    return model, value_head


def _without_adapter(model: nn.Module) -> nn.Module:
    """Return a model without adapters; for a PeftModel, a copy with the adapter merged."""
    if not is_peft(model):
        return model
    merged = merged_copy(model)
    # Under this name, the new adapter's files would refer to the base before the merge (TRL #4713).
    merged.name_or_path = ""
    logger.warning(
        "The policy's adapter is merged into a copy of its base, and the adapter of peft_config is "
        "added to this copy. save_model() writes the whole policy. The adapter in its folder "
        "adapter/ fits only this copy. To train the policy's own adapter, pass no peft_config."
    )
    return merged


def _prepare_frozen(
    engine: Engine,
    model: nn.Module,
    policy: LanguageModel,
    reference: LanguageModel,
    rewards: RewardMix,
) -> None:
    """Move reference and reward models to the device; shard them if the policy will be sharded."""
    frozen = [one for one in reward_holders(rewards, model) if one is not model]
    # The heads stay beside the base: it is on the CPU until the engine shards it.
    rewards.move_adapter_heads(policy.device)
    for module in rewards.modules():
        module.eval().requires_grad_(False).to(engine.device)
    if reference.model is not policy.model:
        frozen.append(reference)
    for one in frozen:
        engine.prepare_frozen(one)


def share_random_scores(models: Iterable[object], engine: Engine) -> None:
    """Copy the score head of process 0 to all processes if only this head differs between them.

    A language model that a script loads as a classifier gets a random head, which differs between
    the processes.
    """
    for model in models if engine.num_processes > 1 else ():
        score = getattr(model, "score", None)
        if not isinstance(model, PreTrainedModel) or not isinstance(score, nn.Module):
            continue
        first, *others = engine.peers.exchange(fingerprint(model))
        different = {name for found in others for name in first if found.get(name) != first[name]}
        if different and all(name.startswith("score.") for name in different):
            score.load_state_dict(engine.peers.of_main(score.state_dict()))
            if engine.is_main:
                logger.warning(
                    "The score head of a %s differed between the processes, so it is random: the "
                    "model has no trained head. All processes now use the head of process 0. Train "
                    "the model as a reward model first.",
                    type(model).__name__,
                )


def require_equal_models(prints: dict[str, Layout], engine: Engine) -> None:
    """Raise if the fingerprints of the models' weights differ between processes.

    All processes raise the same error, because only one of them may print it: a launcher ends the
    other processes after the first error.

    Raises:
        ModelError: a process has other weights than process 0.
    """
    by_rank = engine.peers.exchange(prints)
    for part, expected in by_rank[0].items():
        different = [rank for rank, found in enumerate(by_rank) if found.get(part) != expected]
        if different:
            raise ModelError(
                f"The {part} has other weights in process {different[0]} than in process 0. Load "
                "the same weights in all processes. With FSDP, set fsdp_cpu_ram_efficient_loading: "
                "false; otherwise only one process loads them."
            )


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0, so that the update computes with the policy that sampled."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Layers of transformers store dropout as a float, and PEFT's layers as a dict by adapter.
        for name in [name for name in vars(module) if "drop" in name]:
            value = getattr(module, name)
            if isinstance(value, float):
                setattr(module, name, 0.0)
            elif isinstance(value, dict):
                setattr(module, name, dict.fromkeys(value, 0.0))


def _train_in_fp32(model: nn.Module, critic: Critic | None) -> None:
    """Cast models and adapters with trained weights in half precision to fp32.

    Half precision would round most optimizer steps away. The base of an adapter keeps its
    precision.

    Raises:
        ConfigError: an adapter trains whole modules in half precision, or its base is in float16.
    """
    if is_peft(model):
        _train_adapter_in_fp32(model)
    wholes = [] if is_peft(model) else [model]
    if critic is not None:
        own_backbone = not is_peft(model) or (critic.adapter is None and not _shares(model, critic))
        wholes += [critic] if own_backbone else [critic.head]
        if not own_backbone:
            _train_adapter_in_fp32(critic)
    for whole in wholes:
        trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
        if any(parameter.itemsize < 4 for parameter in trained):
            whole.float()


def _train_adapter_in_fp32(adapted: nn.Module) -> None:
    """Cast the trained matrices of an adapter to fp32.

    PEFT copies the modules in `lora_modules_to_save` in the precision of the base model. A copy in
    fp32 could not read the states of such a base.

    Raises:
        ConfigError: such a module is in half precision, or the base is in float16.
    """
    for name, parameter in adapted.named_parameters():
        if parameter.dtype == torch.float16:
            raise ConfigError(
                f"The policy's {name} is in float16, in which small gradients become 0: float16 "
                "would need loss scaling, which is not implemented. Load the policy in bfloat16 or "
                "float32 (dtype='bfloat16')."
            )
        if not parameter.requires_grad or parameter.itemsize >= 4:
            continue
        if "modules_to_save" in name:
            raise ConfigError(
                f"The adapter trains {name} in {parameter.dtype}, which would round most optimizer "
                "steps away. Load the policy in fp32 (dtype='float32'), or leave the module out of "
                "lora_modules_to_save."
            )
        parameter.data = parameter.data.float()


def _shares(model: nn.Module, other: nn.Module) -> bool:
    of_policy = set(map(id, model.parameters()))
    return any(id(parameter) in of_policy for parameter in other.parameters())


def _make_policy(config: PPOConfig, model: nn.Module) -> LanguageModel:
    if not is_peft(model):
        return LanguageModel(require_causal_lm(model, "policy"))
    if config.model_adapter_name is not None:
        _activate(model, config.model_adapter_name)
    if config.ref_adapter_name is not None:
        model.set_requires_grad(config.ref_adapter_name, requires_grad=False)
    name = model.active_adapter
    base = require_causal_lm(plain_model(model), "policy")
    return LanguageModel(base, within=partial(using_adapter, model, name))


def _activate(model: "PeftModel", name: str) -> None:
    """Activate an adapter; the active adapter is trained and saved."""
    before = model.active_adapter
    others = [
        parameter
        for where, parameter in model.named_parameters()
        if parameter.requires_grad and f".{before}." not in where
    ]
    model.set_adapter(name)
    # `set_adapter` freezes all other adapters, including the critic's.
    for parameter in others:
        parameter.requires_grad_(True)


def _make_critic(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    policy: LanguageModel,
    adapted: "PeftModel | None",
    value_head: nn.Linear | None,
    given: ScriptModels,
) -> Critic | None:
    if not config.has_critic:
        refuse_critic(config, given)
        return None
    if given.critic is not None and config.shared_critic:
        raise ConfigError(
            "shared_critic=True and value_model both set the critic. Pass value_model=None."
        )
    if isinstance(given.critic, Critic):
        return given.critic
    if given.critic is not None:
        return Critic.from_module(given.critic)
    if value_head is not None or config.shared_critic:
        return Critic.on_policy(policy, value_head)
    if adapted is not None and CRITIC_ADAPTER in adapted.peft_config:
        return Critic.on_adapter(adapted)
    for reward_model in given.rewards.models(weighted=True):
        has_its_own_base = isinstance(reward_model.model, PreTrainedModel)
        reads_along = reward_model.lm_head is not None and has_its_own_base
        if reads_along and reward_model.reads_tokens_of(tokenizer):
            return Critic.from_reward_model(reward_model)
    return Critic.from_policy(policy.model if adapted is None else merged_copy(adapted))


def _checkpoint_activations(model: nn.Module, critic: Critic | None) -> None:
    """Recompute activations of policy and critic in the backward pass, in training mode."""
    if is_peft(model):
        checkpoint_activations(model)
    backbones = [plain_model(model)] + ([] if critic is None else [critic.model])
    for backbone in backbones[is_peft(model) :]:
        if isinstance(backbone, PreTrainedModel) and not backbone.is_activation_checkpointing:
            recompute_activations(backbone, {"use_reentrant": False})
