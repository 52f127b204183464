"""Epochs x minibatches x microbatches: what moves policy and critic."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ppo_core.config import PPOConfig
from ppo_core.engine import Engine
from ppo_core.errors import TrainingError
from ppo_core.losses import policy_loss, value_loss
from ppo_core.records import Experience, TokenSums
from ppo_core.tensors import length_sorted_batches


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """What an update moves: the module of policy and critic, and how it steps."""

    module: nn.Module
    """An ActorCritic, as the engine prepared it."""

    optimizer: Optimizer
    scheduler: LRScheduler


def update_policy(
    trainee: Trainee,
    experience: Experience,
    config: PPOConfig,
    engine: Engine,
    generator: torch.Generator,
) -> TokenSums:
    """Learn from a batch of experience: `num_ppo_epochs` passes, each in a new order.

    Returns the sums over the counted tokens of this process.

    Raises:
        TrainingError: a gradient is not finite; the step is not taken.
    """
    sums = TokenSums()
    for epoch in range(config.num_ppo_epochs):
        order = torch.randperm(len(experience.rollout), generator=generator)
        for number, minibatch in enumerate(order.chunk(config.num_mini_batches)):
            untouched = epoch == 0 and number == 0
            _optimizer_step(trainee, experience, minibatch, config, engine, sums, untouched)
    return sums


def _optimizer_step(
    trainee: Trainee,
    experience: Experience,
    minibatch: Tensor,
    config: PPOConfig,
    engine: Engine,
    sums: TokenSums,
    untouched: bool,
) -> None:
    """One step on the mean loss over the minibatch's counted tokens of all processes."""
    rollout = experience.rollout
    minibatch = minibatch.to(rollout.row_lengths.device)
    num_tokens = engine.sum(rollout.response_lengths[minibatch].sum())
    batches = length_sorted_batches(rollout.row_lengths[minibatch], config.microbatch_size)
    for number, batch in enumerate(batches):
        with engine.accumulate_only(trainee.module, number < len(batches) - 1):
            loss = _microbatch_loss(
                trainee.module, experience, minibatch[batch], config, sums, untouched
            )
            engine.backward(loss / num_tokens)
    norm = engine.clip_gradients(trainee.module.parameters(), config.max_grad_norm)
    if not norm.isfinite():
        raise TrainingError(
            f"The gradient's norm is {norm.item()}: the step was not taken, the weights are as "
            "before it. Lower learning_rate, raise kl_coef, or look at the last scores."
        )
    trainee.optimizer.step()
    trainee.scheduler.step()
    trainee.optimizer.zero_grad(set_to_none=True)


def _microbatch_loss(
    module: nn.Module,
    experience: Experience,
    rows: Tensor,
    config: PPOConfig,
    sums: TokenSums,
    untouched: bool,
) -> Tensor:
    """Sum of the losses over the counted tokens of some rows; adds to the sums what it saw."""
    rollout = experience.rollout
    mask = rollout.response_mask[rows]
    old_logprobs = rollout.logprobs[rows][mask]
    logprobs, entropies, values = module(rollout.token_rows(rows), rollout.temperature)
    policy_losses, clipped = policy_loss(
        logprobs, old_logprobs, experience.advantages[rows][mask], cliprange=config.cliprange
    )
    value_losses, value_clipped = value_loss(
        values,
        experience.values[rows][mask],
        experience.returns[rows][mask],
        cliprange_value=config.cliprange_value,
    )
    with torch.no_grad():
        ratio_error = torch.expm1(logprobs - old_logprobs)
        sums.add(
            tokens=mask.sum(),
            policy_loss=policy_losses.sum(),
            value_loss=value_losses.sum(),
            entropy=entropies.sum(),
            approxkl=0.5 * ((logprobs - old_logprobs) ** 2).sum(),
            clipped=clipped.sum(),
            value_clipped=value_clipped.sum(),
            ratio_error=ratio_error.sum(),
            ratio_error_squared=(ratio_error**2).sum(),
        )
        if untouched:
            sums.add(first_tokens=mask.sum(), first_ratio_error=ratio_error.abs().sum())
    return policy_losses.sum() + config.vf_coef * value_losses.sum()
