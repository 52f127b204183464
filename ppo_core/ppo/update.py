"""Epochs x minibatches x microbatches: what moves policy and critic."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ppo_core.algorithm.losses import aggregation_weights
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.batching import token_batches
from ppo_core.data.types import Experience, TokenRows, TokenSums
from ppo_core.distributed.engine import Engine
from ppo_core.errors import RunInterruptedError
from ppo_core.models.actor_critic import ActorCritic, Predictions
from ppo_core.models.kernels.matmul_backend import MIN_NUMEL, uses_onednn
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.objective import CountedTokens, Objective
from ppo_core.ppo.ptx import PretrainingTexts, joined_texts, pretraining_loss
from ppo_core.ppo.side_by_side import Both, one_after_the_other, side_by_side


@dataclass(kw_only=True)
class TrainState:
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
    """The same since the last that was, for a loss or gradient that was not finite; a batch with
    a score that is not finite counts as one."""

    def skip(self, steps: int) -> None:
        """Take none of the optimizer steps of a batch."""
        self.skipped_steps += steps
        self.skipped_in_a_row += 1
        for _ in range(steps):
            self.scheduler.step()


@dataclass(kw_only=True)
class UpdateProgress:
    """How far the update of a batch has come; a checkpoint in the middle of it keeps this."""

    order: Tensor
    """(epochs, B) the rows of the whole batch, in the order of each pass over it."""

    steps_done: int = 0
    """Optimizer steps that are behind, taken or skipped."""

    sums: TokenSums = field(default_factory=TokenSums)
    """What they saw, over all processes."""

    @classmethod
    def at_start(cls, config: PPOConfig, rows: int, generator: torch.Generator) -> "UpdateProgress":
        """`num_ppo_epochs` passes over a batch, each in a new order."""
        passes = range(config.num_ppo_epochs)
        return cls(order=torch.stack([torch.randperm(rows, generator=generator) for _ in passes]))

    def minibatches(self, config: PPOConfig) -> list[Tensor]:
        """The rows of each optimizer step that is left."""
        all_of_them = [part for rows in self.order for part in rows.chunk(config.num_mini_batches)]
        return all_of_them[self.steps_done :]


def update_policy(
    train_state: TrainState,
    experience: Experience,
    config: PPOConfig,
    engine: Engine,
    progress: UpdateProgress,
    *,
    critic_only: bool = False,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Learn from a batch of experience, which every process has whole; fills in `progress`.

    With `critic_only` the policy's loss is left out. Passes end early where the policy has
    moved further than 1.5 x `target_kl`, or after `max_skipped_steps` steps in a row that were
    not finite; all processes decide on the same sum.

    `pause` is called, in all processes alike, before each microbatch. It may raise: the step that
    was begun is then undone, and the update can go on later where `progress` says.
    """
    with _passes(train_state, config, engine) as both:
        step = _OptimizerStep(
            train_state, experience, config, engine, critic_only=critic_only, pause=pause, both=both
        )
        _take_steps(step, progress)


def _take_steps(step: "_OptimizerStep", progress: UpdateProgress) -> None:
    train_state, config = step.train_state, step.config
    minibatches = progress.minibatches(config)
    due = len(minibatches)
    for minibatch in minibatches:
        of_step = step.take(minibatch)
        if progress.steps_done == 0:
            progress.sums.first_tokens = of_step.tokens
            progress.sums.first_ratio_error = of_step.abs_ratio_error
        progress.sums.add_all(of_step)
        progress.steps_done += 1
        due -= 1
        is_hopeless = train_state.skipped_in_a_row >= config.max_skipped_steps
        if is_hopeless or _has_moved_too_far(of_step, config):
            break
    # The schedule counts the steps that were due, so that it ends with the run.
    progress.steps_done += due
    for _ in range(due):
        train_state.scheduler.step()


def _passes(
    train_state: TrainState, config: PPOConfig, engine: Engine
) -> AbstractContextManager[Both]:
    """How policy and critic make their passes where these are two: both at once if they are small.

    What is global in PyTorch is left alone then: the precision of large products, which a
    reference of its own size may have, and the random numbers that whole passes set back where
    they are made again.
    """
    models = (
        [train_state.module]
        if train_state.reference is None
        else [train_state.module, train_state.reference]
    )
    weights = [weight for model in models for weight in model.parameters()]
    is_small = all(weight.numel() < MIN_NUMEL for weight in weights)
    at_once = (
        engine.is_plain
        and engine.device.type == "cpu"
        and torch.get_num_threads() > 1
        and not uses_onednn()
        and is_small
        and not config.gradient_checkpointing
        and cast(ActorCritic, train_state.module).shares_nothing
    )
    return side_by_side() if at_once else nullcontext(one_after_the_other)


def _has_moved_too_far(of_step: TokenSums, config: PPOConfig) -> bool:
    if config.target_kl is None:
        return False
    return of_step.kl_from_old / of_step.tokens > 1.5 * config.target_kl


class _OptimizerStep:
    """One step on the loss of a minibatch, over all its microbatches and all processes."""

    def __init__(
        self,
        train_state: TrainState,
        experience: Experience,
        config: PPOConfig,
        engine: Engine,
        *,
        critic_only: bool,
        pause: Callable[[], None],
        both: Both,
    ) -> None:
        self.train_state = train_state
        self.experience = experience
        self.config = config
        self.engine = engine
        self.critic_only = critic_only
        self.pause = pause
        self.both = both

    def take(self, minibatch: Tensor) -> TokenSums:
        """Step, or skip the step; returns the sums over all processes."""
        texts = self.train_state.pretraining
        before = texts.state_dict() if texts is not None else {}
        rows = minibatch.to(self.experience.rollout.row_lengths.device)
        try:
            with self.engine.learning(self.train_state.module):
                own = self._add_gradients(rows)
        except RunInterruptedError:
            self.engine.discard(self.train_state.module, self.train_state.optimizer)
            if texts is not None:
                texts.load_state_dict(before)
            raise
        sums = own.summed(self.engine.sum)
        self._step(sums)
        return sums

    def _add_gradients(self, minibatch: Tensor) -> TokenSums:
        """Pass this process's share of a minibatch forward and backward; returns its sums."""
        sums = TokenSums()
        self._learn_pretraining_texts(len(minibatch))
        weights = self._row_weights(minibatch)
        batches = self._own_batches(minibatch)
        for number, places in enumerate(batches):
            self.pause()
            more = number < len(batches) - 1
            with self.engine.accumulate_only(self.train_state.module, more):
                self._learn(minibatch[places], weights[places], sums)
        return sums

    def _own_batches(self, minibatch: Tensor) -> list[Tensor]:
        """This process's places in a minibatch, a microbatch at a time.

        Neighbours in length are dealt out to different processes, so that all have equally much
        to do; all make equally many passes, some perhaps without a row at the end.
        """
        config, number = self.config, self.engine.num_processes
        lengths = self.experience.rollout.row_lengths[minibatch]
        most = config.max_tokens_per_microbatch
        batches = token_batches(
            lengths, config.per_device_train_batch_size * number, max_tokens=most and most * number
        )
        return [places[self.engine.rank :: number] for places in batches]

    def _row_weights(self, minibatch: Tensor) -> Tensor:
        """The weight of each counted token of a row, so that the loss is a mean over the step."""
        lengths = self.experience.rollout.response_mask[minibatch].sum(dim=1)
        return aggregation_weights(
            lengths,
            self.config.loss_aggregation,
            num_tokens=lengths.sum(),
            num_responses=len(lengths),
            response_length=self.config.response_length,
        )

    def _learn(self, rows: Tensor, weights: Tensor, sums: TokenSums) -> None:
        """Add the gradient of the weighted losses of the counted tokens; fills the sums.

        Without rows it is 0, after a pass of the batch's first row: all processes must pass, and
        have a gradient for every parameter.
        """
        if len(rows) == 0:
            first = torch.zeros(1, dtype=torch.long, device=rows.device)
            self._learn(first, torch.zeros(1, device=rows.device), TokenSums())
            return
        tokens = CountedTokens.of(self.experience, rows, weights)
        objective = Objective(self.config, tokens)
        engine = self.engine
        module = cast(ActorCritic, self.train_state.module)
        rollout, reference = self.experience.rollout, self.train_state.reference
        joined = rollout.token_rows(rows)
        inputs = joined, rollout.temperature, objective.of_policy, reference
        # Times 0 and not left out: every process must have a gradient for every parameter.
        policy_weight = 0.0 if self.critic_only else 1.0
        if engine.is_plain and not module.shares_backbone:

            def learn_policy() -> Predictions:
                with module.policy.backbone.products(joined.ids):
                    with engine.autocast():
                        predicted = module.of_policy(*inputs)
                    engine.backward(policy_weight * objective.of_predictions(predicted))
                return predicted

            def learn_critic() -> Tensor:
                with module.critic.backbone.products(joined.ids):
                    with engine.autocast():
                        values = module.critic(joined)
                    engine.backward(objective.of_critic(values))
                return values

            predicted, values = self.both(learn_policy, learn_critic)
        else:
            with self._products(joined):
                predicted, values = module(*inputs)
                of_policy = policy_weight * objective.of_predictions(predicted)
                engine.backward(of_policy + objective.of_critic(values))
        sums.add(**objective.sums(predicted, values))

    def _products(self, rows: TokenRows) -> AbstractContextManager[None]:
        """By what the layers are multiplied in a pass of policy and critic, there and back."""
        trained = cast(ActorCritic, self.engine.unwrap(self.train_state.module))
        return trained.policy.backbone.products(rows.ids)

    def _learn_pretraining_texts(self, num_rows: int) -> None:
        """Add the gradient of the language-modelling loss on as many texts as responses."""
        texts, engine = self.train_state.pretraining, self.engine
        if texts is None or self.critic_only:
            return
        size = self.config.per_device_train_batch_size * engine.num_processes
        drawn = [texts.next_texts(min(size, num_rows - n)) for n in range(0, num_rows, size)]
        total = sum(len(text) - 1 for batch in drawn for text in batch)
        for batch in drawn:
            self.pause()
            own = batch[engine.rank :: engine.num_processes]
            rows = joined_texts(own or batch[:1]).to(engine.device)
            more = engine.accumulate_only(self.train_state.module, True)
            with more, self._products(rows):
                weight = self.config.ptx_coef / total if own else 0.0
                predicted, values = self.train_state.module(rows, 1.0, pretraining_loss(weight))
                # ZeRO-3 adds to the gradient of the step before where the first pass of a step
                # has none: so the critic's is 0 here, and not missing.
                engine.backward(predicted.loss + 0.0 * values.sum())

    def _step(self, sums: TokenSums) -> None:
        """Take the step, unless a loss, a gradient or the ratio forbids it, in any process."""
        train_state, engine = self.train_state, self.engine
        if self._ratio_is_too_large(sums):
            engine.discard(train_state.module, train_state.optimizer)
            train_state.skipped_steps += 1
        else:
            norm = engine.step(train_state.module, train_state.optimizer, self.config.max_grad_norm)
            finite = bool(norm.isfinite())
            train_state.skipped_steps += not finite
            train_state.skipped_in_a_row = 0 if finite else train_state.skipped_in_a_row + 1
        train_state.scheduler.step()

    def _ratio_is_too_large(self, sums: TokenSums) -> bool:
        if self.config.ratio_threshold is None:
            return False
        return 1 + sums.ratio_error / sums.tokens > self.config.ratio_threshold
