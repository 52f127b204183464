"""The update: epochs, minibatches and microbatches of PPO's losses on one batch of experience."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ppo_core.algorithm.losses import aggregation_weights
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.batching import token_batches
from ppo_core.data.types import Experience, Rollout, TokenSums, map_tensors
from ppo_core.distributed.engine import Engine
from ppo_core.io.progress_bar import each_pass
from ppo_core.models.critic import ActorCritic
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.objective import SUMS
from ppo_core.ppo.passes import Microbatch, Passes, may_run_both, two_threads
from ppo_core.ppo.ptx import PretrainingTexts, add_pretraining_gradients
from ppo_core.ppo.schedule import POLICY


@dataclass(kw_only=True)
class TrainState:
    """The state that an update changes: policy and critic, their optimizer, and counters."""

    module: nn.Module
    """An ActorCritic, as the engine prepared it."""

    optimizer: Optimizer
    scheduler: LRScheduler
    engine: Engine

    reference: LanguageModel | None = None
    """The reference, if the exact KL divergence is part of the loss."""

    pretraining: PretrainingTexts | None = None
    """Texts of the pretraining term of the loss (PPO-ptx), if there is one."""

    large_ratios_end_run: bool = True
    """Whether steps that `ratio_threshold` skips count towards `skipped_in_a_row`."""

    skipped_steps: int = 0
    """Optimizer steps of the run that were skipped."""

    skipped_in_a_row: int = 0
    """Optimizer steps skipped since the last step that was taken. A step is skipped if its loss or
    gradient is not finite, or because of `ratio_threshold`. A batch with a score that is not finite
    counts as one step."""

    @property
    def actor_critic(self) -> ActorCritic:
        """The module without the engine's wrapper."""
        return cast(ActorCritic, self.engine.unwrap(self.module))

    def skip_batch(self, steps: int) -> None:
        """Skip all optimizer steps of a batch."""
        self.skipped_steps += steps
        self.skipped_in_a_row += 1
        for _ in range(steps):
            self.scheduler.step()

    def count_step(self, *, is_taken: bool, counts_in_a_row: bool = True) -> None:
        """Count one optimizer step, and advance the learning rate."""
        self.skipped_steps += not is_taken
        if is_taken:
            self.skipped_in_a_row = 0
        elif counts_in_a_row:
            self.skipped_in_a_row += 1
        self.scheduler.step()


@dataclass(kw_only=True)
class UpdateProgress:
    """Progress of the update on one batch; a checkpoint during the update contains it."""

    order: Tensor
    """(epochs, B) indices into the full batch: the order of the sequences in each epoch."""

    steps_done: int = 0
    """Optimizer steps taken, skipped, or left out by an early stop."""

    sums: TokenSums = field(default_factory=TokenSums)
    """Sums over the tokens of the steps that were taken or skipped, over all processes."""

    @classmethod
    def at_start(
        cls, config: PPOConfig, num_sequences: int, generator: torch.Generator
    ) -> "UpdateProgress":
        """Draw a new order of the batch for each of `num_ppo_epochs` epochs."""
        epochs = range(config.num_ppo_epochs)
        orders = [torch.randperm(num_sequences, generator=generator) for _ in epochs]
        return cls(order=torch.stack(orders))

    def minibatches(self, config: PPOConfig) -> list[Tensor]:
        """Return the row numbers of the sequences of each optimizer step, epoch by epoch."""
        return [part for epoch in self.order for part in epoch.chunk(config.num_mini_batches)]

    def add_step(self, sums: TokenSums) -> None:
        """Count one optimizer step and its sums."""
        if self.steps_done == 0:
            self.sums.first_tokens = sums.tokens
            self.sums.first_ratio_error = sums.abs_ratio_error
        self.sums.add(sums)
        self.steps_done += 1


def update_policy(
    state: TrainState,
    experience: Experience | None,
    config: PPOConfig,
    progress: UpdateProgress,
    *,
    critic_only: bool = False,
    before_step: Callable[[], None] = lambda: None,
) -> TokenSums:
    """Train policy and critic on a full batch; return the sums over its tokens and epochs.

    The update continues from `progress`, which is changed in place. All processes must call this
    function with the full batch. If the experience is None, all optimizer steps are skipped. With
    `critic_only`, the policy's loss is left out. The update ends early when the policy has moved
    more than 1.5 x `target_kl` from the sampling policy, after `max_skipped_steps` skipped steps in
    a row, or if `ratio_threshold` would skip all remaining steps for the same reason.

    `before_step` is called before each optimizer step, when the state is consistent. If
    `before_step` raises, another call of `update_policy` with the same `progress` continues the
    update.
    """
    minibatches, engine = progress.minibatches(config), state.engine
    if experience is None:
        state.skip_batch(len(minibatches))
        return progress.sums
    experience = map_tensors(experience, lambda tensor: tensor.to(engine.device))
    temperature = experience.rollout.temperature
    with _passes(state, config, temperature, critic_only=critic_only) as passes:
        while progress.steps_done < len(minibatches):
            before_step()
            minibatch = minibatches[progress.steps_done].to(engine.device)
            if state.pretraining is not None and not critic_only:
                add_pretraining_gradients(
                    state.pretraining, state.module, engine, config, num_texts=len(minibatch)
                )
            sums = torch.zeros(len(SUMS), dtype=torch.float64, device=engine.device)
            microbatches = _own_microbatches(experience.rollout, minibatch, config, engine)
            for microbatch in each_pass(microbatches, "updating"):
                sums += passes.backward(experience, microbatch)
            if critic_only:
                _leave_policy_out(state.optimizer)
            totals = _optimizer_step(state, sums, config)
            progress.add_step(totals)
            is_hopeless = state.skipped_in_a_row >= config.max_skipped_steps
            if is_hopeless or _moved_too_far(totals, config) or _would_repeat(totals, config):
                # Advance the schedule for the omitted steps too, so that it ends with the run.
                for _ in range(progress.steps_done, len(minibatches)):
                    state.scheduler.step()
                progress.steps_done = len(minibatches)
    return progress.sums


@contextmanager
def _passes(
    state: TrainState, config: PPOConfig, temperature: float, *, critic_only: bool
) -> Iterator[Passes]:
    """Yield the passes of an update; at the end the module is in evaluation mode.

    With `gradient_checkpointing` the module is in training mode, because transformers recomputes
    activations only in this mode. All dropout probabilities are 0 in both modes.
    """
    recomputes, module = config.gradient_checkpointing, state.actor_critic
    at_once = may_run_both(state.engine, module, state.reference, recomputes=recomputes)
    state.module.train(recomputes)
    try:
        with two_threads(enabled=at_once) as second_thread:
            yield Passes(
                config=config,
                engine=state.engine,
                module=state.module,
                reference=state.reference,
                temperature=temperature,
                critic_only=critic_only,
                second_thread=second_thread,
            )
    finally:
        state.module.eval()


def _leave_policy_out(optimizer: Optimizer) -> None:
    """Remove the gradients of the policy's parameters, so that AdamW does not count this step.

    If AdamW counted steps in which its moments stay 0, its bias correction would be wrong, and the
    policy's first real steps would be up to three times too large. A shared backbone belongs to the
    policy. ZeRO keeps gradients outside `parameter.grad`: with ZeRO this function has no effect,
    and AdamW counts these steps.
    """
    for group in optimizer.param_groups:
        if group.get("name") == POLICY:
            for parameter in group["params"]:
                parameter.grad = None


def _moved_too_far(sums: TokenSums, config: PPOConfig) -> bool:
    if config.target_kl is None:
        return False
    return sums.kl_from_old / sums.tokens > 1.5 * config.target_kl


def _would_repeat(sums: TokenSums, config: PPOConfig) -> bool:
    """Return whether `ratio_threshold` would skip the remaining steps as it skipped this one.

    The weights are unchanged, so the next epoch has the same ratios if an epoch is one step. Each
    repetition would count towards `max_skipped_steps`, so one large update would end the run.
    """
    return config.num_mini_batches == 1 and _ratio_is_too_large(sums, config)


def _optimizer_step(state: TrainState, sums: Tensor, config: PPOConfig) -> TokenSums:
    """Take an optimizer step, or skip it; return the sums over all processes.

    `sums` (len(SUMS),) are the sums of this process. They are copied to the host only here.
    """
    engine = state.engine
    totals = TokenSums(**dict(zip(SUMS, engine.sum(sums).tolist(), strict=True)))
    if _ratio_is_too_large(totals, config):
        engine.discard(state.module, state.optimizer)
        state.count_step(is_taken=False, counts_in_a_row=state.large_ratios_end_run)
    else:
        norm = engine.step(state.module, state.optimizer, config.max_grad_norm)
        state.count_step(is_taken=bool(norm.isfinite()))
    return totals


def _own_microbatches(
    rollout: Rollout, minibatch: Tensor, config: PPOConfig, engine: Engine
) -> list[Microbatch]:
    """Return this process's microbatches of a minibatch.

    `minibatch` has the row numbers of the sequences of all processes. Sequences of similar length
    are distributed over the processes, so that all processes do a similar amount of work. All
    processes have the same number of microbatches; some microbatches may be empty.
    """
    counted = rollout.response_mask[minibatch].sum(dim=1)
    weights = aggregation_weights(
        counted,
        config.loss_aggregation,
        num_tokens=counted.sum(),
        num_responses=len(counted),
        response_length=config.response_length,
    )
    batches = token_batches(
        rollout.row_lengths[minibatch],
        config.per_device_train_batch_size,
        max_tokens=config.max_tokens_per_microbatch,
        processes=engine.num_processes,
    )
    own = [positions[engine.rank :: engine.num_processes] for positions in batches]
    return [
        Microbatch(minibatch[positions], weights[positions], is_last=number == len(own))
        for number, positions in enumerate(own, start=1)
    ]


def _ratio_is_too_large(sums: TokenSums, config: PPOConfig) -> bool:
    if config.ratio_threshold is None:
        return False
    return 1 + sums.ratio_error / sums.tokens > config.ratio_threshold
