"""Fit an earlier run's critic to this run's rewards, before the first update.

A critic at the end of a run predicts the returns of the trained policy under the rewards of that
run. The next run starts again at the reference and has other rewards. So a run keeps its first
rollouts beside its critic: their policies are near those of the next run's first updates. The next
run scores these responses with its own rewards, and trains the critic on the returns. The figures
are in docs/retraining.md.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import torch

from ppo_core.algorithm.running_moments import RunningMoments
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.types import Experience, Rollout, Scores, TokenSums, map_tensors
from ppo_core.distributed.engine import Engine
from ppo_core.ppo.experience import make_experience, shaped_scores
from ppo_core.ppo.model_bundle import reward_holders
from ppo_core.ppo.reward_functions import RewardMix
from ppo_core.ppo.schedule import CRITIC
from ppo_core.ppo.update import TrainState, UpdateProgress, update_policy

NUM_KEPT = 5
"""Number of first rollouts that a run keeps."""

NUM_EPOCHS = 4
"""Number of times that the critic is trained on all kept rollouts."""

UNCLIPPED = 1e9
"""A `cliprange_value` that no value reaches."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CriticFit:
    """Fits the critic of a run; all processes must call `run`."""

    config: PPOConfig
    engine: Engine
    rewards: RewardMix
    train_state: TrainState

    def run(self, rollouts: Sequence[Rollout]) -> None:
        """Train the critic on the returns of an earlier run's rollouts under this run's rewards.

        The target of a token is its return without the KL divergence and without bootstrapping. The
        learning rate falls linearly from the largest rate of the run to 0. Afterwards, optimizer
        and schedule start as without the fit. The policy is not trained.

        Nothing is trained if `rewards` names a function, which might need more than tokens.
        """
        if not self.rewards.scores_tokens:
            logger.warning(
                "The critic is not fitted to the rewards of this run, because a reward is a "
                "function, or a reward model with another vocabulary than the policy."
            )
            return
        experiences = [self._experience(rollout) for rollout in rollouts]
        generator = torch.Generator().manual_seed(self.config.seed)
        losses = []
        with self._own_optimization() as set_rates:
            for epoch in range(NUM_EPOCHS):
                sums = TokenSums()
                for number, experience in enumerate(experiences):
                    done = (epoch + number / len(experiences)) / NUM_EPOCHS
                    sums.add(self._train(experience, generator, partial(set_rates, 1 - done)))
                losses.append(sums.value_loss / max(sums.tokens, 1))
        if self.engine.is_main:
            logger.info(
                "The critic was fitted to %d responses of an earlier run: value loss %.3g -> %.3g.",
                sum(map(len, rollouts)),
                losses[0],
                losses[-1],
            )

    def _experience(self, rollout: Rollout) -> Experience | None:
        """Score a rollout; return None if a score is not finite."""
        rollout = map_tensors(rollout, lambda tensor: tensor.to(self.engine.device))
        size, nothing = len(rollout), torch.zeros_like(rollout.logprobs)
        share = self.engine.share(size)
        own = map_tensors(rollout, lambda tensor: tensor[share])
        prompts = [
            ids[:length].tolist()
            for ids, length in zip(own.prompt_ids, own.prompt_lengths, strict=True)
        ]
        holders = reward_holders(self.rewards, self.train_state.module)
        with self.engine.autocast(), self.engine.all_gathered(holders):
            total, parts = self.rewards(prompts, own)
        empty = nothing[share]
        scores = Scores(scores=total, parts=parts, ref_logprobs=empty, values=empty)
        scores = self.engine.gather_record(scores, size)
        if not scores.scores.isfinite().all():
            return None
        if self.config.scale_each_reward:
            scores = self.rewards.scaled(scores, {})
        shaped = shaped_scores(scores.scores, rollout, self.config, RunningMoments())
        # With values of 0 and lambda 1, the critic's targets are the returns.
        config = replace(self.config, lam_critic=1.0)
        return make_experience(
            rollout, replace(scores, scores=shaped), nothing, config, kl_coef=0.0
        )

    def _train(
        self,
        experience: Experience | None,
        generator: torch.Generator,
        set_rates: Callable[[], None],
    ) -> TokenSums:
        """Train the critic once on each response."""
        # The values of the experience are not the critic's, so the loss must not keep near them.
        config = replace(self.config, num_ppo_epochs=1, cliprange_value=UNCLIPPED)
        if experience is None:
            return TokenSums()
        progress = UpdateProgress.at_start(config, len(experience.rollout), generator)
        return update_policy(
            self.train_state,
            experience,
            config,
            progress,
            critic_only=True,
            before_step=set_rates,
        )

    @contextmanager
    def _own_optimization(self) -> Iterator[Callable[[float], None]]:
        """Yield a function that sets the learning rate; restore optimizer and schedule at the end.

        The function sets the critic's rate to a fraction of the largest rate of the run, and the
        policy's rate to 0.
        """
        scheduler, groups = self.train_state.scheduler, self.train_state.optimizer.param_groups
        rates, state = [group["lr"] for group in groups], deepcopy(scheduler.state_dict())

        def set_rates(fraction: float) -> None:
            for group, largest in zip(groups, scheduler.base_lrs, strict=True):
                group["lr"] = largest * fraction if group["name"] == CRITIC else 0.0

        yield set_rates
        # AdamW starts again, as for a critic that was loaded.
        module, optimizer = self.train_state.module, self.train_state.optimizer
        self.engine.load_optimizer_states(module, optimizer, lambda name: {})
        scheduler.load_state_dict(state)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
