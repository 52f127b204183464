"""The forward and backward passes of an update, and how policy and critic share them.

If policy and critic share a backbone, or if several processes or an engine such as DeepSpeed train
them, one pass of the prepared module computes both. Otherwise each model has its own pass. Usually
one pass follows the other, so that the activations of only one model are in memory. But on the CPU,
the passes of a small policy and a small critic run at the same time, in two threads: the matmuls of
a model with a million weights are too small to keep several cores busy.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.types import Experience, TokenRows
from ppo_core.distributed.engine import Engine
from ppo_core.models.critic import ActorCritic, Critic
from ppo_core.models.kernels.matmul_backend import MIN_NUMEL, uses_onednn
from ppo_core.models.policy import LanguageModel, Predictions
from ppo_core.ppo.objective import CountedTokens, Objective

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Microbatch:
    """The sequences of one forward and backward pass of this process."""

    sequences: Tensor
    """(n,) row numbers in the full batch; empty if only other processes have sequences."""

    token_weights: Tensor
    """(n,) loss weight of each counted token of a sequence."""

    is_last: bool
    """Whether this is the last microbatch of the minibatch."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Runs the forward and backward passes of microbatches through policy and critic."""

    config: PPOConfig
    engine: Engine

    module: nn.Module
    """An ActorCritic, as the engine prepared it."""

    reference: LanguageModel | None
    """The reference, if the exact KL divergence is part of the loss."""

    temperature: float

    critic_only: bool
    """Whether only the critic gets gradients. In a pass that also computes the critic, the policy's
    loss is multiplied by 0 instead, because each parameter must have a gradient."""

    second_thread: ThreadPoolExecutor | None
    """Thread for the policy's passes; None to run both models in the same thread."""

    def backward(self, experience: Experience, microbatch: Microbatch) -> Tensor:
        """Add the gradients of one microbatch; return its sums, in the order of `SUMS`.

        For an empty microbatch, run the shortest sequence of the batch with weight 0, because
        every process must run the pass, and every parameter must have a gradient.
        """
        sequences, weights = microbatch.sequences, microbatch.token_weights
        is_empty = len(sequences) == 0
        if is_empty:
            sequences = experience.rollout.row_lengths.argmin().view(1)
            weights = weights.new_zeros(1)
        rows = experience.rollout.token_rows(sequences)
        tokens = CountedTokens.of(experience, sequences, rows, weights)
        objective = Objective(self.config, tokens)
        with self.engine.accumulate_only(self.module, not microbatch.is_last):
            if not self.engine.is_plain or self._models.shares_backbone:
                with self._models.policy.backbone.products(rows.ids):
                    predicted, values = self.module(
                        rows, self.temperature, objective.of_policy, self.reference
                    )
                    loss = objective.of_predictions(predicted)
                    if self.critic_only:
                        loss = 0.0 * loss
                    if values is not None:
                        loss = loss + objective.of_critic(values)
                    self.engine.backward(loss)
            elif (critic := self._models.critic) is None:
                predicted = self._policy_pass(rows, objective)
            elif self.second_thread is not None:
                predicted, _ = run_both(
                    self.second_thread,
                    partial(self._policy_pass, rows, objective),
                    partial(self._critic_pass, critic, rows, objective),
                )
            else:
                predicted = self._policy_pass(rows, objective)
                self._critic_pass(critic, rows, objective)
        sums = objective.sums(predicted)
        return torch.zeros_like(sums) if is_empty else sums

    @property
    def _models(self) -> ActorCritic:
        return cast(ActorCritic, self.engine.unwrap(self.module))

    def _policy_pass(self, rows: TokenRows, objective: Objective) -> Predictions:
        """Add the gradients of the policy's loss, unless only the critic gets gradients."""
        policy = self._models.policy
        with policy.backbone.products(rows.ids), torch.set_grad_enabled(not self.critic_only):
            with self.engine.autocast():
                predicted = policy.predict(
                    policy.backbone.states(rows),
                    rows,
                    self.temperature,
                    objective.of_policy,
                    self.reference,
                )
            if not self.critic_only:
                self.engine.backward(objective.of_predictions(predicted))
        return predicted

    def _critic_pass(self, critic: Critic, rows: TokenRows, objective: Objective) -> None:
        """Add the gradients of the critic's loss."""
        with critic.backbone.products(rows.ids):
            with self.engine.autocast():
                values = critic(rows)
            self.engine.backward(objective.of_critic(values))


def may_run_both(
    engine: Engine, module: ActorCritic, reference: LanguageModel | None, *, recomputes: bool
) -> bool:
    """Return whether policy and critic are small and separate enough for `run_both`.

    Return False if the backward pass recomputes activations (`recomputes`). Recomputation restores
    PyTorch's random state, which two threads would share.
    """
    models = [one for one in (module, reference) if one is not None]
    return (
        engine.is_plain
        and engine.device.type == "cpu"
        and not recomputes
        and module.critic is not None
        and module.shares_nothing
        and _pays_concurrently(models)
    )


@contextmanager
def two_threads(*, enabled: bool) -> Iterator[ThreadPoolExecutor | None]:
    """Yield a second thread for `run_both`, or None if not enabled.

    Inside the context, each of the two threads uses half of PyTorch's compute threads.
    """
    if not enabled:
        yield None
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        with ThreadPoolExecutor(1) as second_thread:
            yield second_thread
    finally:
        torch.set_num_threads(threads)


def run_both(
    second_thread: ThreadPoolExecutor, first: Callable[[], A], second: Callable[[], B]
) -> tuple[A, B]:
    """Call two functions, which must not change shared state, in two threads; return both results.

    If both functions raise, the error of `second` is raised.
    """
    future = second_thread.submit(first)
    result = second()
    return future.result(), result


def _pays_concurrently(models: Sequence[nn.Module]) -> bool:
    """Return whether concurrent passes are faster, because all weight matrices are small.

    Return False if oneDNN runs the matmuls, because its matmul precision is a process-wide
    setting that two threads cannot change independently.
    """
    is_small = all(weight.numel() < MIN_NUMEL for one in models for weight in one.parameters())
    return is_small and torch.get_num_threads() > 1 and not uses_onednn()
