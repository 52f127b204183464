"""The optimizer of policy and critic: its parameter groups, and checks of a user's optimizer."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError
from ppo_core.models.critic import ActorCritic, Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.ptx import PretrainingTexts
from ppo_core.ppo.schedule import CRITIC, POLICY, Schedule, make_scheduler
from ppo_core.ppo.update import TrainState


def make_train_state(
    config: PPOConfig,
    module: ActorCritic,
    reference: LanguageModel,
    schedule: Schedule,
    engine: Engine,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    *,
    pretraining: PretrainingTexts | None,
) -> TrainState:
    """Prepare policy and critic for training with an optimizer and a scheduler.

    If `optimizer` is None, AdamW is used. If `scheduler` is None, the settings decide the schedule.

    Raises:
        ConfigError: the given optimizer leaves parameters out; the given scheduler is for another
            optimizer or contradicts a setting; see also `make_scheduler` and `check_sharding`.
    """
    if optimizer is None:
        optimizer = torch.optim.AdamW(
            parameter_groups(module.policy, module.critic, config),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )
    else:
        check_optimizer(optimizer, module)
    if scheduler is None:
        scheduler = make_scheduler(optimizer, config, schedule)
    elif scheduler.optimizer is not optimizer:
        raise ConfigError(
            "The given scheduler belongs to another optimizer than the one that trains, so the "
            "learning rate would stay constant. Pass the scheduler with its own optimizer: "
            "optimizers=(optimizer, scheduler)."
        )
    elif config.critic_warmup_updates:
        raise ConfigError(
            f"critic_warmup_updates={config.critic_warmup_updates} needs a scheduler that keeps "
            "the policy's learning rate at 0, and the given scheduler does not. Remove "
            "critic_warmup_updates or the scheduler."
        )
    check_sharding(config, engine, module)
    prepared, optimizer = engine.prepare(module, optimizer)
    exact_in_loss = config.kl_in_loss and config.kl_estimator == "full"
    return TrainState(
        module=prepared,
        optimizer=optimizer,
        scheduler=scheduler,
        engine=engine,
        reference=reference if exact_in_loss else None,
        pretraining=pretraining,
    )


def parameter_groups(
    policy: LanguageModel, critic: Critic | None, config: PPOConfig
) -> list[dict[str, Any]]:
    """Return the named parameter groups; weight decay applies only to matrices.

    The parameters of a shared backbone are in the policy's groups. Empty groups are left out,
    because DeepSpeed would drop them from the optimizer but not from the scheduler.
    """
    of_policy = policy_parameters(policy, critic)
    of_critic = critic_parameters(policy, critic)
    groups = [
        {
            "name": name,
            "lr": learning_rate,
            "params": [p for p in parameters if p.requires_grad and (p.ndim >= 2) == decays],
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for name, parameters, learning_rate in (
            (POLICY, of_policy, config.learning_rate),
            (CRITIC, of_critic.values(), config.critic_learning_rate or config.learning_rate),
        )
        for decays in (True, False)
    ]
    return [group for group in groups if group["params"]]


def policy_parameters(policy: LanguageModel, critic: Critic | None) -> list[nn.Parameter]:
    """Return the policy's parameters without the parameters that only the critic uses."""
    of_critic = set(map(id, critic_parameters(policy, critic).values()))
    return [parameter for parameter in policy.parameters() if id(parameter) not in of_critic]


def critic_parameters(policy: LanguageModel, critic: Critic | None) -> dict[str, nn.Parameter]:
    """Return the parameters that only the critic uses, by name; a shared backbone is left out.

    If the critic is an adapter on the policy's base, the adapter's parameters are included.
    """
    if critic is None:
        return {}
    of_policy = set(map(id, policy.parameters()))
    return {
        name: parameter
        for name, parameter in critic.named_parameters()
        if id(parameter) not in of_policy
        or (critic.adapter is not None and f".{critic.adapter}." in name)
    }


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise if the optimizer leaves out a trained parameter (TRL #2463).

    Raises:
        ConfigError: a trainable parameter of policy or critic is not in the optimizer.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if left_out:
        raise ConfigError(
            f"The optimizer leaves out {len(left_out)} trained parameters, for example "
            f"{left_out[0]}, so they would never change. Create the optimizer with the parameters "
            "of both policy and critic, or set optimizers=(None, None)."
        )


def check_sharding(config: PPOConfig, engine: Engine, module: nn.Module) -> None:
    """Check that policy and settings work with sharded weights, if the weights are sharded.

    Raises:
        ConfigError: weights are sharded, and `ema_decay` is set or the policy is quantized.
    """
    if config.ema_decay and engine.shards_weights:
        raise ConfigError(
            f"ema_decay={config.ema_decay} needs the full policy in every process, but with "
            f"sharding={engine.sharding!r} each process holds only a shard. Remove ema_decay, or "
            "set sharding='zero2'."
        )
    frozen_bytes = [name for name, p in module.named_parameters() if not p.is_floating_point()]
    if frozen_bytes and engine.shards_weights:
        raise ConfigError(
            f"The policy is quantized ({frozen_bytes[0]}), and sharding={engine.sharding!r} cannot "
            "shard quantized weights. Set sharding='ddp' or 'zero2', or load the policy without "
            "quantization."
        )
