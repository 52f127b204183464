"""Train PPO in rounds: pause, label samples of the policy, and continue with a new reward model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from pipeline.evaluation.pair_accuracy import Array
from pipeline.inputs.flow_run import PPO, FlowRun
from pipeline.inputs.labeled_pairs import label_pairs
from pipeline.inputs.run_data import RunData
from pipeline.judges.judge_budget import Spent, sum_spent
from pipeline.launch.job import Pause
from pipeline.results.step_records import FreshPairs, PreparedModel, RewardRound
from pipeline.reward_validation.scores import TextScorer, score_pairs
from pipeline.stages.fresh_pairs import label_round
from pipeline.stages.sft_and_reward_models import CODE, better_reward_model, train_fresh_model
from pipeline.tracking.tracker import Tracker
from ppo_core.checkpointing.folders import finished_checkpoints
from ppo_core.config.placement import placement_for_reading
from ppo_core.data.rows.read_rows import Rows
from ppo_core.errors import DataError
from ppo_core.errors.out_of_memory import free_unused
from ppo_core.io.folder_cache import digest_of, digest_of_code
from ppo_core.io.imported_modules import imported_modules
from ppo_core.models.loading import load_reward_model

Costs: TypeAlias = dict[str, Spent]
"""Calls and tokens by name of the labeler."""


@dataclass(frozen=True, kw_only=True)
class ScaledReward:
    """A reward model with the scaling of its scores: the reward is gain * (score - bias)."""

    model: PreparedModel
    bias: float
    gain: float


def decides_the_rounds(data: RunData, fresh: FreshPairs | None) -> dict[str, Any]:
    """Return what later rounds add to the inputs of the policy; {} for a single round."""
    settings = data.settings
    if settings.fresh_pairs.rounds == 1:
        return {}
    assert fresh is not None  # with several rounds, pairs are always labeled
    weight, members = settings.fresh_pairs.given_weight, settings.reward_model_training.members
    feedback = data.feedback()
    return {
        "rounds": settings.fresh_pairs.rounds,
        # The name of the folder contains a digest of the pairs and of the labeler.
        "pairs": fresh.path.rpartition("/")[2],
        "given": [weight, data.training_pairs().digest] if weight else [],
        "feedback": [settings.feedback_weight, feedback.digest] if feedback else [],
        "held_out_share": settings.held_out_share,
        "overlong": settings.overlong,
        "reward_training": settings.reward_model_training.settings_of_result(),
        **({"members": members} if members > 1 else {}),
        "reward_code": digest_of_code(__name__, *imported_modules(CODE)),
    }


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds of a run: PPO pauses after each round, and continues with a new reward model."""

    tracker: Tracker
    data: RunData
    run: FlowRun
    sft: PreparedModel

    policy: PreparedModel
    """Folder of the policy when PPO pauses, and a digest of all that determines the policy."""

    updates: int
    """Number of updates of PPO in all rounds together."""

    train_part: Callable[[ScaledReward, Pause], None]
    """Function that trains the policy, from the newest checkpoint up to the pause."""

    @property
    def count(self) -> int:
        """Number of rounds."""
        return self.data.settings.fresh_pairs.rounds

    def train(self, first: ScaledReward, fresh: FreshPairs) -> tuple[list[RewardRound], Costs]:
        """Run all rounds; return the reward models after the first, and the cost of their labels.

        Labels and reward models are cached, and PPO writes checkpoints. Therefore a killed run
        repeats only the updates after its last checkpoint.
        """
        reward, pairs, made = first, [fresh], []
        spent: Costs = {}
        for number in range(1, self.count):
            labeled, are_enough = self._label(reward, fresh, number)
            spent = sum_spent(spent, labeled.spent)
            # If the labels come from an earlier run, PPO may not have reached the end of the round.
            if self._updates_done() < self._end_of(number):
                self._train_until(reward, number)
            if not are_enough:
                print(f"round {number + 1}: the reward model stays, for lack of pairs", flush=True)
                continue
            pairs.append(labeled)
            reward = self._next_reward(reward, pairs, number + 1)
            model = reward.model
            made.append(RewardRound(number=number + 1, path=model.path, digest=model.digest))
        self._train_until(reward, self.count)
        return made, spent

    def _end_of(self, number: int) -> int:
        """Return the number of updates at the end of a round."""
        return self.updates * number // self.count

    def _updates_done(self) -> int:
        return max(finished_checkpoints(self.run.folder / PPO), default=0)

    def _train_until(self, reward: ScaledReward, number: int) -> None:
        """Train the policy to the end of a round.

        Raises:
            DataError: PPO is already beyond the round.
        """
        done, end = self._updates_done(), self._end_of(number)
        if done > end:
            raise DataError(
                f"PPO paused after {end} updates for labels. These labels are not in the cache any "
                f"more, and PPO in {self.run.folder / PPO} is already at update {done}. Start a "
                "new run."
            )
        # A checkpoint at the end of the previous round was written with the previous reward model.
        is_new = 0 < done == self._end_of(number - 1)
        self.train_part(reward, Pause(after_updates=end, has_new_reward=is_new))

    def _label(
        self, reward: ScaledReward, fresh: FreshPairs, number: int
    ) -> tuple[FreshPairs, bool]:
        """Return what `label_round` returns for samples of the policy at the end of a round."""
        policy = replace(self.policy, digest=digest_of([self.policy.digest, number]))
        labeled = label_round(
            self.tracker,
            self.data,
            policy,
            fresh,
            self.run,
            number=number + 1,
            pause=lambda: self._train_until(reward, number),
        )
        free_unused()
        return labeled

    def _next_reward(
        self, reward: ScaledReward, pairs: list[FreshPairs], number: int
    ) -> ScaledReward:
        """Train a reward model on the pairs of all rounds so far.

        Return the new model or the present one; `better_reward_model` chooses by the last round's
        pairs.
        """
        settings, run = self.data.settings, self.run
        trained = train_fresh_model(settings, self.sft, pairs, run, self.tracker)
        names = (f"round-{number}/reward-model", f"round-{number}/fresh-reward-model")
        better = better_reward_model(
            settings, reward.model, trained, pairs[-1], run, self.tracker, names
        )
        if better.digest != reward.model.digest:
            reward = self._scaled_like(reward, better, pairs[-1])
        free_unused()
        return reward

    def _scaled_like(
        self, old: ScaledReward, model: PreparedModel, pairs: FreshPairs
    ) -> ScaledReward:
        """Return `model`, scaled to keep the mean and spread of the rewards of the pairs."""
        fetch = self.run.workspace.fetch_files
        rows = self.data.all_fresh_pairs(fetch(pairs).path)
        before, after = (
            _score_texts(self.data, fetch(each).path, rows) for each in (old.model, model)
        )
        return rescaled(old, model, before, after)


def _score_texts(data: RunData, model: str, rows: Rows) -> Array:
    """Return the scores of both answers of each pair."""
    scorer = TextScorer(
        load_reward_model(
            model,
            end_of_text=data.settings.reward_model_training.end_of_text,
            prompt_format=data.reward_format,
            placement=placement_for_reading(),
        )
    )
    return np.concatenate(score_pairs(scorer, label_pairs(rows)))


def rescaled(old: ScaledReward, model: PreparedModel, before: Array, after: Array) -> ScaledReward:
    """Return `model`, scaled so that the rewards keep their mean and standard deviation.

        gain' = gain * std(before) / std(after)
        bias' = mean(after) - gain / gain' * (mean(before) - bias)

    So the critic's values stay right on average, and `kl_coef` keeps its weight against rewards.

    Args:
        old: the earlier reward model, with its scaling.
        model: the new reward model.
        before: scores (N,) of the earlier model for samples of the policy.
        after: scores (N,) of the new model for the same samples.
    """
    spread, new_spread = float(before.std()), float(after.std())
    if not (spread and new_spread):
        # One of the models gives all samples the same score, so the spreads cannot be matched.
        spread = new_spread = 1.0
    gain = old.gain * spread / new_spread
    bias = float(after.mean()) - old.gain / gain * (float(before.mean()) - old.bias)
    # Four digits, because rounding errors differ between the machines that may continue a run.
    return ScaledReward(model=model, bias=float(f"{bias:.4g}"), gain=float(f"{gain:.4g}"))
