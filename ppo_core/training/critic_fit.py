"""Fit an earlier run's critic to this run's rewards, before the first update.

At the end of a run, a critic predicts the returns of the trained policy under the rewards of that
run. The next run starts again from the reference, with other rewards. So a run that saves its
critic also keeps its first rollouts, sampled while the policy was near the reference. The next run
scores them with its own rewards, and trains the critic on the returns. The figures are in
tests/benchmarks/RETRAINING.md.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import torch

from ppo_core.algorithm.running_moments import RunningMoments
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.types import Experience, Scores, TokenSums, map_tensors
from ppo_core.distributed.engine import Engine
from ppo_core.models.files.rollout_files import KeptRollout
from ppo_core.ppo.experience import make_experience, shaped_scores
from ppo_core.ppo.model_bundle import reward_holders
from ppo_core.ppo.rewards import RewardMix
from ppo_core.ppo.schedule import CRITIC
from ppo_core.ppo.update import TrainState, UpdateProgress, update_policy

NUM_KEPT = 5
"""Number of first rollouts that a run keeps."""

NUM_EPOCHS = 4
"""Number of times that the critic is trained on all kept rollouts."""

UNCLIPPED = 1e9
"""A `cliprange_value` so large that no value is clipped."""


@dataclass(frozen=True, kw_only=True)
class CriticFit:
    """Fits the critic of a run; all processes must call `run`."""

    config: PPOConfig
    engine: Engine
    rewards: RewardMix
    train_state: TrainState

    def run(self, rollouts: Sequence[KeptRollout], pause: Callable[[], None]) -> None:
        """Train the critic on the returns of an earlier run's rollouts under this run's rewards.

        The target of a token is its return without the KL divergence and without bootstrapping. The
        learning rate falls linearly from the largest rate of the run to 0. Afterwards, optimizer,
        schedule and counters are as before. The policy is not trained.

        Nothing is trained if a reward is not a reward model with the policy's vocabulary. Reward
        functions are excluded because they may need columns, which are not kept.

        `pause` is called before each optimizer step. It may raise to stop the fit.
        """
        rewards = self.rewards.weighted()
        if not rewards.scores_tokens:
            self._print(
                "was not fitted, because a reward is not a reward model with the policy's "
                "vocabulary."
            )
            return
        moments, of_rewards = RunningMoments(), dict[str, RunningMoments]()
        scored = [self._experience(each, rewards, moments, of_rewards) for each in rollouts]
        experiences = [each for each in scored if each is not None]
        if not experiences:
            self._print("was not fitted, because no rollout has finite scores.")
            return
        generator = torch.Generator().manual_seed(self.config.seed)
        losses = []
        with self._own_optimization(pause) as prepare_step:
            for epoch in range(NUM_EPOCHS):
                sums = TokenSums()
                for number, experience in enumerate(experiences):
                    done = (epoch + number / len(experiences)) / NUM_EPOCHS
                    sums.add(self._train(experience, generator, partial(prepare_step, 1 - done)))
                losses.append(sums.value_loss / max(sums.tokens, 1))
        count = sum(len(each.rollout) for each in experiences)
        self._print(
            f"was fitted to {count} responses of an earlier run: value loss {losses[0]:.3g} -> "
            f"{losses[-1]:.3g}."
        )

    def _print(self, what: str) -> None:
        if self.engine.is_main:
            print(f"The critic {what}", file=sys.stderr)

    def _experience(
        self,
        kept: KeptRollout,
        rewards: RewardMix,
        moments: RunningMoments,
        of_rewards: dict[str, RunningMoments],
    ) -> Experience | None:
        """Score a rollout, and update the moments; return None if a score is not finite."""
        rollout = map_tensors(kept.rollout, lambda tensor: tensor.to(self.engine.device))
        size, zeros = len(rollout), torch.zeros_like(rollout.logprobs)
        share = self.engine.share(size)
        own = map_tensors(rollout, lambda tensor: tensor[share])
        prompts = [kept.prompts[number] for number in share]
        holders = reward_holders(rewards, self.train_state.module)
        with self.engine.autocast(), self.engine.all_gathered(holders):
            total, parts = rewards(prompts, own)
        scores = Scores(scores=total, parts=parts, ref_logprobs=zeros[share], values=zeros[share])
        scores = self.engine.gather_record(scores, size)
        if not scores.scores.isfinite().all():
            return None
        if self.config.scale_each_reward:
            scores = rewards.scaled(scores, of_rewards)
        shaped = shaped_scores(scores.scores, rollout, self.config, moments)
        # With values of 0 and lambda 1, GAE is the discounted sum of the rewards, so the critic's
        # targets are the returns.
        config = replace(self.config, lam_critic=1.0)
        return make_experience(rollout, replace(scores, scores=shaped), zeros, config, kl_coef=0.0)

    def _train(
        self,
        experience: Experience,
        generator: torch.Generator,
        before_step: Callable[[], None],
    ) -> TokenSums:
        """Train the critic once on each response."""
        config = replace(
            self.config,
            num_ppo_epochs=1,
            # The old values are 0, so clipping would keep the new values near 0.
            cliprange_value=UNCLIPPED,
            # These settings need log-probabilities of the rollouts, which are not kept.
            kl_in_loss=False,
            target_kl=None,
            ratio_threshold=None,
        )
        progress = UpdateProgress.at_start(config, len(experience.rollout), generator)
        return update_policy(
            self.train_state,
            experience,
            config,
            progress,
            critic_only=True,
            before_step=before_step,
        )

    @contextmanager
    def _own_optimization(self, pause: Callable[[], None]) -> Iterator[Callable[[float], None]]:
        """Yield a function to call before each step; at the end, restore all but the critic.

        The function calls `pause`. Then it sets the critic's learning rate to a fraction of the
        largest rate of the run, and the policy's rate to 0.
        """
        state = self.train_state
        scheduler, groups = state.scheduler, state.optimizer.param_groups
        rates, schedule = [group["lr"] for group in groups], deepcopy(scheduler.state_dict())
        skipped = state.skipped_steps, state.skipped_in_a_row

        def prepare_step(fraction: float) -> None:
            pause()
            for group, largest in zip(groups, scheduler.base_lrs, strict=True):
                group["lr"] = largest * fraction if group.get("name") == CRITIC else 0.0

        try:
            yield prepare_step
        finally:
            # Clear AdamW's state: the first update starts without moments, as in every run.
            self.engine.load_optimizer_states(state.module, state.optimizer, lambda name: {})
            scheduler.load_state_dict(schedule)
            state.skipped_steps, state.skipped_in_a_row = skipped
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
