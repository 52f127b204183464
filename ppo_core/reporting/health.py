"""Warnings for metrics of a run that cross a limit, with advice on what to change."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import TrainingError
from ppo_core.reporting.metrics_file import UPDATE
from ppo_core.reporting.reward_drop import WINDOW, RewardDrop

RECOVERY_SHARE = 0.25
"""A value is clearly good if it is on the good side of the limit by this fraction of the limit."""

RECOVERY_UPDATES = 3
"""Number of consecutive updates with clearly good values after which a metric has recovered."""

REWARD = "objective/rlhf_reward"
DROP = f"drop of {REWARD}"
"""Name under which the guards read the result of `RewardDrop`, as if it were a metric."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A metric and its limit."""

    metric: str

    side: Literal["above", "below"]
    """Side of the limit on which a value is bad."""

    limit: Callable[[PPOConfig, float], float]
    """Function of the settings and the metric's value in the first update; returns the limit."""

    rule: str
    """Origin of the limit, shown in the warning."""

    updates: int = 1
    """Number of consecutive updates with bad values before the warning."""

    words: str
    """Probable cause, and advice, shown in the warning."""

    note: Callable[[PPOConfig], str] = lambda _: ""
    """Function of the settings; returns a text at the end of the warning."""

    def is_bad(self, value: float, limit: float) -> bool:
        """Return whether the value is on the bad side of the limit; False for NaN."""
        return value > limit if self.side == "above" else value < limit

    def is_clearly_good(self, value: float, limit: float) -> bool:
        """Return whether the value is clearly good, see RECOVERY_SHARE; False for NaN."""
        margin = RECOVERY_SHARE * abs(limit)
        return value < limit - margin if self.side == "above" else value > limit + margin


GUARDS = {
    "far from reference": Guard(
        metric="objective/kl",
        side="above",
        limit=lambda config, _: config.warn_kl,
        rule="warn_kl",
        words="The policy is moving far from the reference, because the KL penalty is too weak "
        "for the reward, or optimizer steps are too large. Raise kl_coef, set kl_target, or lower "
        "learning_rate. Read some responses, because the policy may exploit the reward model.",
        note=lambda config: config.warn_kl_note,
    ),
    "negative divergence": Guard(
        metric="objective/kl",
        side="below",
        limit=lambda config, _: -1.0,
        rule="the divergence is never negative, and its estimate only slightly",
        words="Sampling and training probably use different distributions, for example because "
        "truncated sampling, padding, dropout or the temperature affects only one of the two. Set "
        "top_k=0 and top_p=1, and check that val/first_ratio_error is near 0.",
    ),
    "ratio too high": Guard(
        metric="val/ratio",
        side="above",
        limit=lambda config, _: config.warn_ratio,
        rule="warn_ratio",
        words="Within one update the policy moved so far from the policy at sampling time that "
        "the advantages are no longer valid. Lower learning_rate or num_ppo_epochs, or set "
        "ratio_threshold or target_kl. If val/first_ratio_error is not near 0, sampling and "
        "training compute different probabilities.",
    ),
    "ratio too low": Guard(
        metric="val/ratio",
        side="below",
        limit=lambda config, _: 1 / (5 * config.warn_ratio),
        rule="1 / (5 x warn_ratio)",
        words="Within one update the sampled tokens became unlikely under the policy. Lower "
        "learning_rate or num_ppo_epochs, or set target_kl. If val/first_ratio_error is not near "
        "0, sampling and training compute different probabilities.",
    ),
    "entropy collapse": Guard(
        metric="policy/entropy_avg",
        side="below",
        limit=lambda config, first: config.warn_entropy * first,
        rule="warn_entropy x the value in the first update",
        words="The policy has become nearly deterministic and samples almost identical responses "
        "to a prompt, so training no longer explores. Resume from an earlier checkpoint with a "
        "lower learning_rate, a higher kl_coef or a higher temperature.",
    ),
    "critic explains nothing": Guard(
        metric="val/explained_variance",
        side="below",
        limit=lambda config, _: config.warn_explained_variance,
        rule="warn_explained_variance",
        updates=3,
        words="The critic predicts returns worse than a constant would, which makes advantages "
        "noisier. Set critic_warmup_updates, change critic_learning_rate or raise vf_coef. If "
        "scores are large, set use_score_scaling.",
    ),
    "length growth": Guard(
        metric="val/response_length",
        side="above",
        limit=lambda config, first: config.warn_length_growth * first,
        rule="warn_length_growth x the value in the first update",
        words="The reward model probably prefers long responses regardless of content. Read some "
        "responses. Set length_penalty or overlong_buffer, or missing_eos_penalty if responses "
        "lack a stop token.",
    ),
    "repetition": Guard(
        metric="val/repetition",
        side="above",
        limit=lambda config, _: config.warn_repetition,
        rule="warn_repetition",
        words="Responses repeat themselves, and the reward model does not penalize repetition. "
        "Read some responses. Raise kl_coef, lower learning_rate, or retrain the reward model.",
    ),
    "reward for repetition": Guard(
        metric="val/repetition_reward",
        side="above",
        limit=lambda config, _: 0.5,
        rule="correlation of score and repetition among responses of equal length, lower end of "
        "its 99 % interval",
        updates=2,
        words="The reward pays for repetition, so the policy will learn to repeat itself. "
        "Read the responses with the highest scores. Correct the reward, or stop the run; a "
        "higher kl_coef only delays the repetition.",
    ),
    "falling reward": Guard(
        metric=DROP,
        side="above",
        limit=lambda config, _: 3.0,
        rule=f"mean of the best {WINDOW} updates less mean of the last {WINDOW}, in standard "
        "deviations of the noise of one update",
        updates=3,
        words="The policy loses reward that it had, because optimizer steps are too large, or the "
        "KL penalty grows faster than the scores. Lower learning_rate or num_ppo_epochs. If "
        "objective/scores rises, lower kl_coef or raise kl_target.",
    ),
    "skipped steps": Guard(
        metric="val/skipped_steps",
        side="above",
        limit=lambda config, _: 0.0,
        rule="number of optimizer steps that were skipped",
        words="A score, a loss or a gradient was not finite, or the mean ratio was above "
        "ratio_threshold, so nothing was learned in these steps. Check the last scores and the "
        "models for values that are not finite. Lower learning_rate or set bf16=False. The run "
        "ends after max_skipped_steps such steps in a row.",
    ),
}


class HealthMonitor:
    """Checks metrics against `GUARDS`.

    A guard that has warned is silent until its metric has clearly recovered, so a metric that
    fluctuates around its limit causes only one warning.
    """

    def __init__(self, config: PPOConfig) -> None:
        """Take the limits from the settings."""
        self._config = config
        self._first: dict[str, float] = {}
        # Number of consecutive updates with bad values. If the guard has warned: number of
        # consecutive updates with clearly good values.
        self._in_a_row = dict.fromkeys(GUARDS, 0)
        self._warned: set[str] = set()
        self._drop = RewardDrop()

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the new warnings after an update with these metrics.

        The state of a guard does not change if its metric is missing in `metrics`.
        """
        if math.isfinite(reward := metrics.get(REWARD, math.nan)):
            drop = self._drop.update(reward)
            metrics = {**metrics, DROP: 0.0 if drop is None else drop}
        return [
            self._message(name, guard, metrics)
            for name, guard in GUARDS.items()
            if guard.metric in metrics and self._begins(name, guard, metrics)
        ]

    def _begins(self, name: str, guard: Guard, metrics: Mapping[str, float]) -> bool:
        """Count the update for a guard, and return whether the guard warns now."""
        value, limit = metrics[guard.metric], self._limit(guard, metrics)
        has_warned = name in self._warned
        counts = guard.is_clearly_good if has_warned else guard.is_bad
        in_a_row = self._in_a_row[name] + 1 if counts(value, limit) else 0
        changes = in_a_row >= (RECOVERY_UPDATES if has_warned else guard.updates)
        self._in_a_row[name] = 0 if changes else in_a_row
        if changes:
            self._warned ^= {name}
        return changes and not has_warned

    def _message(self, name: str, guard: Guard, metrics: Mapping[str, float]) -> str:
        rows = f" for {guard.updates} updates" if guard.updates > 1 else ""
        text = (
            f"{name.capitalize()}: {guard.metric} is {metrics[guard.metric]:.3g}, {guard.side} "
            f"{self._limit(guard, metrics):.3g}{rows} ({guard.rule}). {guard.words} "
            f"{guard.note(self._config)}"
        )
        return text.rstrip()

    def _limit(self, guard: Guard, metrics: Mapping[str, float]) -> float:
        first = self._first.setdefault(guard.metric, metrics[guard.metric])
        return guard.limit(self._config, first)

    def check_skipped(self, in_a_row: int) -> None:
        """Raise if too many optimizer steps in a row were skipped.

        Raises:
            TrainingError: `in_a_row` is at least `max_skipped_steps`.
        """
        if in_a_row >= self._config.max_skipped_steps:
            raise TrainingError(
                f"{in_a_row} steps in a row had a score, a loss or a gradient that is not finite, "
                "or a mean ratio above ratio_threshold "
                f"(max_skipped_steps={self._config.max_skipped_steps}). These steps were skipped, "
                "so the weights are those after the last good step. Check the last scores, lower "
                "learning_rate or set bf16=False, and start a new run with the latest checkpoint "
                "as the initial policy."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, serializable as JSON."""
        return {
            "first": dict(self._first),
            "in_a_row": dict(self._in_a_row),
            "warned": sorted(self._warned),
            "drop": self._drop.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, also from older checkpoints without "first", "warned" and "drop"."""
        self._in_a_row.update(state["in_a_row"])
        if "drop" in state:
            self._drop.load_state_dict(state["drop"])
        if "first" in state:
            self._first, self._warned = dict(state["first"]), set(state["warned"])
            return
        length = state["first_length"]
        self._first = {} if length is None else {"val/response_length": length}
        self._warned = {n for n, guard in GUARDS.items() if self._in_a_row[n] >= guard.updates}
        self._in_a_row |= dict.fromkeys(self._warned, 0)


def warnings_of(config: PPOConfig, updates: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the warnings that a run logged, each with the number of its update.

    Args:
        config: settings of the run.
        updates: metrics of all updates in order, each with the number of the update as `update`.
    """
    monitor = HealthMonitor(config)
    return [
        as_logged(int(metrics[UPDATE]), warning)
        for metrics in updates
        for warning in monitor.check(metrics)
    ]


def as_logged(update: int, warning: str) -> str:
    """Return a warning with the number of its update, as a run logs it."""
    return f"Update {update}. {warning}"
