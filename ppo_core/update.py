"""Epochs x minibatches x microbatches: what moves policy and critic."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ppo_core.config import PPOConfig
from ppo_core.engine import Engine
from ppo_core.kl import kl_per_token
from ppo_core.losses import aggregation_weights, policy_loss, value_loss
from ppo_core.models import LanguageModel
from ppo_core.pretraining import PretrainingTexts, pretraining_loss
from ppo_core.records import Experience, TokenSums
from ppo_core.tensors import length_sorted_batches


@dataclass(kw_only=True)
class Trainee:
    """What an update moves: the module of policy and critic, and how it steps."""

    module: nn.Module
    """An ActorCritic, as the engine prepared it."""

    optimizer: Optimizer
    scheduler: LRScheduler

    reference: LanguageModel | None = None
    """The reference, where the exact divergence is part of the loss."""

    pretraining: PretrainingTexts | None = None
    """Texts that policy must not forget, where the loss has such a term (PPO-ptx)."""

    skipped_steps: int = 0
    """Optimizer steps of the run that were not taken."""

    skipped_in_a_row: int = 0
    """The same since the last that was, for a loss or gradient that was not finite."""


def update_policy(
    trainee: Trainee,
    experience: Experience,
    config: PPOConfig,
    engine: Engine,
    generator: torch.Generator,
    *,
    critic_only: bool = False,
) -> TokenSums:
    """Learn from a batch of experience: `num_ppo_epochs` passes, each in a new order.

    With `critic_only` the policy's loss is left out. Passes end early where the policy has
    moved further than 1.5 x `target_kl`, or after `max_skipped_steps` steps in a row that were
    not finite; all processes decide on the same sum. Returns the sums over the counted tokens
    of this process.
    """
    sums = TokenSums()
    minibatches = [
        minibatch
        for _ in range(config.num_ppo_epochs)
        for minibatch in torch.randperm(len(experience.rollout), generator=generator).chunk(
            config.num_mini_batches
        )
    ]
    due = len(minibatches)
    for minibatch in minibatches:
        step = _OptimizerStep(trainee, experience, config, engine, critic_only=critic_only)
        of_step = step.take(minibatch, untouched=sums.tokens == 0)
        sums.add_all(of_step)
        due -= 1
        is_hopeless = trainee.skipped_in_a_row >= config.max_skipped_steps
        if is_hopeless or _has_moved_too_far(of_step, config, engine):
            break
    # The schedule counts the steps that were due, so that it ends with the run.
    for _ in range(due):
        trainee.scheduler.step()
    return sums


def _has_moved_too_far(of_step: TokenSums, config: PPOConfig, engine: Engine) -> bool:
    if config.target_kl is None:
        return False
    total = of_step.summed(engine.sum, engine.device)
    return total.kl_from_old / total.tokens > 1.5 * config.target_kl


class _OptimizerStep:
    """One step on the loss of a minibatch, over all its microbatches and all processes."""

    def __init__(
        self,
        trainee: Trainee,
        experience: Experience,
        config: PPOConfig,
        engine: Engine,
        *,
        critic_only: bool,
    ) -> None:
        self.trainee = trainee
        self.experience = experience
        self.config = config
        self.engine = engine
        self.critic_only = critic_only

    def take(self, minibatch: Tensor, *, untouched: bool) -> TokenSums:
        """Step, or skip the step; returns the sums of this process."""
        config, rollout = self.config, self.experience.rollout
        minibatch = minibatch.to(rollout.row_lengths.device)
        sums = TokenSums()
        self._learn_pretraining_texts(len(minibatch))
        weights = self._row_weights(minibatch)
        batches = length_sorted_batches(
            rollout.row_lengths[minibatch], config.per_device_train_batch_size
        )
        for number, batch in enumerate(batches):
            more = number < len(batches) - 1
            with self.engine.accumulate_only(self.trainee.module, more):
                loss = self._loss(minibatch[batch], weights[batch], sums)
                self.engine.backward(loss)
        if untouched:
            sums.first_tokens, sums.first_ratio_error = sums.tokens, sums.abs_ratio_error
        self._step(sums)
        return sums

    def _row_weights(self, minibatch: Tensor) -> Tensor:
        """The weight of each counted token of a row, so that the loss is a mean over the step."""
        lengths = self.experience.rollout.response_mask[minibatch].sum(dim=1)
        totals = torch.stack([lengths.sum(), torch.full_like(lengths[0], len(lengths))])
        num_tokens, num_responses = self.engine.sum(totals)
        return aggregation_weights(
            lengths,
            self.config.loss_aggregation,
            num_tokens=num_tokens,
            num_responses=num_responses,
            response_length=self.config.response_length,
        )

    def _loss(self, rows: Tensor, weights: Tensor, sums: TokenSums) -> Tensor:
        """The weighted losses of the counted tokens of some rows, summed; fills the sums."""
        config, experience, rollout = self.config, self.experience, self.experience.rollout
        mask = rollout.response_mask[rows]
        old_logprobs = rollout.logprobs[rows][mask]
        predicted = self.trainee.module(
            rollout.token_rows(rows), rollout.temperature, self.trainee.reference
        )
        policy_losses, clipped = policy_loss(
            predicted.logprobs,
            old_logprobs,
            experience.advantages[rows][mask],
            cliprange=config.cliprange,
            cliprange_high=config.cliprange_high,
            dual_clip=config.dual_clip,
        )
        if rollout.behaviour_logprobs is not None:
            # Drawn from a part of the policy: weigh by its share (arXiv:2110.00641, eq. 5).
            behaviour = rollout.behaviour_logprobs[rows][mask]
            policy_losses = policy_losses * torch.exp(old_logprobs - behaviour)
        value_losses, value_clipped = value_loss(
            predicted.values,
            experience.values[rows][mask],
            experience.returns[rows][mask],
            cliprange_value=config.cliprange_value,
        )
        divergences = self._divergences(predicted.logprobs, predicted.full_kl, rows, mask)
        moved = (predicted.logprobs - old_logprobs).detach()
        ratio_error = torch.expm1(moved)
        sums.add(
            tokens=mask.sum(),
            policy_loss=policy_losses.detach().sum(),
            value_loss=value_losses.detach().sum(),
            kl_loss=divergences.detach().sum(),
            entropy=predicted.entropies.sum(),
            approxkl=0.5 * (moved**2).sum(),
            kl_from_old=(ratio_error - moved).sum(),
            clipped=clipped.sum(),
            value_clipped=value_clipped.sum(),
            ratio_error=ratio_error.sum(),
            abs_ratio_error=ratio_error.abs().sum(),
            ratio_error_squared=(ratio_error**2).sum(),
        )
        # Times 0 and not left out: every process must have a gradient for every parameter.
        policy_weight = 0.0 if self.critic_only else 1.0
        of_policy = policy_losses + experience.kl_loss_coef * divergences
        losses = policy_weight * of_policy + config.vf_coef * value_losses
        row_of_token = mask.nonzero()[:, 0]
        return (weights[row_of_token] * losses).sum()

    def _divergences(
        self, logprobs: Tensor, full_kl: Tensor | None, rows: Tensor, mask: Tensor
    ) -> Tensor:
        """The divergence from the reference in the loss (N,); zeros where it is in the reward."""
        if not self.config.kl_in_loss:
            return torch.zeros_like(logprobs)
        if full_kl is not None:
            return full_kl
        ref_logprobs = self.experience.ref_logprobs[rows][mask]
        return kl_per_token(logprobs, ref_logprobs, self.config.kl_estimator)

    def _learn_pretraining_texts(self, num_rows: int) -> None:
        """Add the gradient of the language-modelling loss on as many texts as responses."""
        texts, engine = self.trainee.pretraining, self.engine
        if texts is None or self.critic_only:
            return
        share = slice(engine.rank, None, engine.num_processes)
        size = self.config.per_device_train_batch_size
        batches = [
            texts.next_rows(min(size, num_rows - start) * engine.num_processes, share)
            for start in range(0, num_rows, size)
        ]
        own = torch.tensor(float(sum(len(batch.targets) for batch in batches)))
        total = engine.sum(own.to(engine.device))
        for batch in batches:
            with engine.accumulate_only(self.trainee.module, True):
                logprobs = self.trainee.module(batch.to(engine.device), 1.0).logprobs
                part = len(logprobs) / total
                engine.backward(self.config.ptx_coef * part * pretraining_loss(logprobs))

    def _step(self, sums: TokenSums) -> None:
        """Take the step, unless a loss, a gradient or the ratio forbids it, in any process."""
        trainee, engine = self.trainee, self.engine
        if self._ratio_is_too_large(sums):
            engine.discard(trainee.module, trainee.optimizer)
            trainee.skipped_steps += 1
        else:
            norm = engine.step(trainee.module, trainee.optimizer, self.config.max_grad_norm)
            finite = bool(norm.isfinite())
            trainee.skipped_steps += not finite
            trainee.skipped_in_a_row = 0 if finite else trainee.skipped_in_a_row + 1
        trainee.scheduler.step()

    def _ratio_is_too_large(self, sums: TokenSums) -> bool:
        if self.config.ratio_threshold is None:
            return False
        total = sums.summed(self.engine.sum, self.engine.device)
        return 1 + total.ratio_error / total.tokens > self.config.ratio_threshold
