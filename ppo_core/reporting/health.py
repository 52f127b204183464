"""Warn, with advice, if a metric of an update crosses a limit; end a run that skips steps."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import TrainingError
from ppo_core.reporting.reward_drop import WINDOW, RewardDrop

RECOVERY_SHARE = 0.25
"""A value is clearly good if it is on the good side, and its distance from the limit is at least
this fraction of the limit."""

RECOVERY_UPDATES = 3
"""Number of consecutive updates with clearly good values after which a metric has recovered."""

REWARD = "objective/rlhf_reward"
DROP = f"drop of {REWARD}"
"""Name of the result of `RewardDrop`, which the guards read like a metric."""

SKIPPED = "val/skipped_steps"
NEWLY_SKIPPED = f"rise of {SKIPPED}"
"""Name of the number of steps that an update skipped; SKIPPED counts those of the whole run."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault that was found in a training."""

    rule: str
    """Name of the rule that found the fault."""

    evidence: str
    """Metrics and limits that show the fault, as text without a full stop at its end."""

    advice: str
    """Probable cause, and what to change."""

    source: str
    """Origin of the rule."""

    update: int | None = None
    """Update in which the fault began; None if unknown, or if the whole run has the fault."""

    def __str__(self) -> str:
        """Return the text of a warning."""
        when = "" if self.update is None else f"Update {self.update}. "
        return f"{when}{self.rule.capitalize()}: {self.evidence}. {self.advice}"


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A metric and its limit."""

    metric: str

    side: Literal["above", "below"]
    """Side of the limit on which a value is bad."""

    limit: Callable[[PPOConfig, float], float]
    """Function of the settings and the metric's first finite value; returns the limit."""

    rule: str
    """Setting that gives the limit, or an explanation of limit or metric; shown in the warning."""

    updates: int = 1
    """Number of consecutive updates with bad values before the warning."""

    words: str
    """Probable cause, and advice, shown in the warning."""

    source: str
    """Publication, issue or document that the guard comes from."""

    note: Callable[[PPOConfig], str] = lambda _: ""
    """Function of the settings; returns a text at the end of the warning."""

    def is_bad(self, value: float, limit: float) -> bool:
        """Return whether the value is on the bad side of the limit; False for NaN."""
        return value > limit if self.side == "above" else value < limit

    def is_clearly_good(self, value: float, limit: float) -> bool:
        """Return whether the value is clearly good, see RECOVERY_SHARE; False for NaN."""
        margin = RECOVERY_SHARE * abs(limit)
        return value <= limit - margin if self.side == "above" else value >= limit + margin


GUARDS = {
    "far from reference": Guard(
        metric="objective/kl",
        side="above",
        limit=lambda config, _: config.warn_kl,
        rule="warn_kl",
        words="The policy is moving far from the reference, because the KL penalty is too weak "
        "for the reward, or optimizer steps are too large. Raise kl_coef, set kl_target, or lower "
        "learning_rate. Read some responses, because the policy may exploit the reward model.",
        source="arXiv:2210.10760 (Gao et al.): as the divergence grows, the reward model's score "
        "keeps rising, and the true reward falls",
        note=lambda config: config.warn_kl_note,
    ),
    "negative divergence": Guard(
        metric="objective/kl",
        side="below",
        limit=lambda config, _: -1.0,
        rule="the true divergence is never negative, and an estimate is at most slightly negative",
        words="Sampling and training probably use different distributions, for example because "
        "truncated sampling, padding, dropout or the temperature affects only one of the two. Set "
        "top_k=0 and top_p=1, and check that val/first_ratio_error is near 0.",
        source="TRL issues 235, 256 and 1003: padding and truncated sampling made it negative",
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
        source="TRL's documentation of PPO: the ratio floats around 1; 2 or 1000 is too high",
    ),
    "ratio too low": Guard(
        metric="val/ratio",
        side="below",
        limit=lambda config, _: 1 / (5 * config.warn_ratio),
        rule="1 / (5 x warn_ratio)",
        words="Within one update the sampled tokens became unlikely under the policy. Lower "
        "learning_rate or num_ppo_epochs, or set target_kl. If val/first_ratio_error is not near "
        "0, sampling and training compute different probabilities.",
        source="TRL's documentation of PPO: the ratio floats around 1; 0.1 is too small",
    ),
    "entropy collapse": Guard(
        metric="policy/entropy_avg",
        side="below",
        limit=lambda config, first: config.warn_entropy * first,
        rule="warn_entropy x the value in the first update",
        words="The policy has become nearly deterministic and samples almost identical responses "
        "to a prompt, so training no longer explores. Start again with a lower "
        "learning_rate, a higher kl_coef or a higher temperature, or resume from an earlier "
        "checkpoint with one of these settings and resume_anyway.",
        source="arXiv:2503.14476 (DAPO), section 3.1: entropy collapse ends exploration",
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
        source="OpenAI Baselines, explained_variance: below 0 is worse than predicting nothing",
    ),
    "length growth": Guard(
        metric="val/response_length",
        side="above",
        limit=lambda config, first: config.warn_length_growth * first,
        rule="warn_length_growth x the value in the first update",
        words="The reward model probably prefers long responses regardless of content. Read some "
        "responses. Set length_penalty or overlong_buffer, or missing_eos_penalty if responses "
        "lack a stop token.",
        source="arXiv:2310.03716 (Singhal et al.): reward models pay for length",
    ),
    "repetition": Guard(
        metric="val/repetition",
        side="above",
        limit=lambda config, _: config.warn_repetition,
        rule="warn_repetition",
        words="Responses repeat themselves, and the reward model does not penalize repetition. "
        "Read some responses. Raise kl_coef, lower learning_rate, or retrain the reward model.",
        source="arXiv:1904.09751 (Holtzman et al.): repetition is degenerate text",
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
        source="docs/reward-model.md, on reward models that prefer repeated text",
    ),
    "falling reward": Guard(
        metric=DROP,
        side="above",
        limit=lambda config, _: 3.0,
        rule=f"mean of the best {WINDOW} updates minus mean of the last {WINDOW}, as a multiple of "
        "the noise of one update",
        updates=3,
        words="The policy loses reward that it had, because optimizer steps are too large, or the "
        "KL penalty grows faster than the scores. Lower learning_rate or num_ppo_epochs. If "
        "objective/scores rises, lower kl_coef or raise kl_target.",
        source="TRL's documentation of PPO: objective/rlhf_reward should go up",
    ),
    "first pass off": Guard(
        metric="val/first_ratio_error",
        side="above",
        # Allow rounding errors of bfloat16, which a frozen base may use even with bf16=False.
        limit=lambda config, _: 0.05,
        rule="in the first pass over a batch, the policy is still the one that sampled, so the "
        "ratio is 1",
        words="Sampling and training compute different probabilities, for example because dropout "
        "is on or a layer is not deterministic. Every update starts from wrong ratios. Remove "
        "callbacks that change the models, and set bf16=False to rule out rounding.",
        source="TRL issues 2358 and 2110: drift moved the ratio off 1 in the first step",
    ),
    "large steps": Guard(
        metric="policy/clipfrac_avg",
        side="above",
        limit=lambda config, _: 0.3,
        rule="share of tokens whose ratio was clipped",
        updates=3,
        words="Most of what the batch teaches is cut off, because optimizer steps are too large. "
        "Lower learning_rate or num_ppo_epochs, or set target_kl.",
        source="The 37 Implementation Details of PPO, detail 12 (clipfrac)",
    ),
    "skipped steps": Guard(
        metric=NEWLY_SKIPPED,
        side="above",
        limit=lambda config, _: 0.0,
        rule="number of optimizer steps that this update skipped",
        words="A score, a loss or a gradient was not finite, or the mean ratio was above "
        "ratio_threshold, so nothing was learned in these steps. Check the last scores and the "
        "models for values that are not finite. Lower learning_rate or set bf16=False. The run "
        "ends after max_skipped_steps such steps in a row.",
        source="TRL issues 488, 454 and 1347: single spikes destroyed runs",
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
        self._skipped = 0.0

    def check(self, metrics: Mapping[str, float]) -> list[Finding]:
        """Return the faults that begin in an update with these metrics.

        If the metric of a guard is missing in `metrics`, the guard's state does not change.
        """
        if math.isfinite(reward := metrics.get(REWARD, math.nan)):
            drop = self._drop.update(reward)
            metrics = {**metrics, DROP: 0.0 if drop is None else drop}
        if SKIPPED in metrics:
            metrics = {**metrics, NEWLY_SKIPPED: metrics[SKIPPED] - self._skipped}
            self._skipped = metrics[SKIPPED]
        return [
            self._finding(name, guard, metrics)
            for name, guard in GUARDS.items()
            if guard.metric in metrics and self._begins(name, guard, metrics)
        ]

    def is_lasting(self, rule: str) -> bool:
        """Return whether a guard has warned, and its metric has not recovered since."""
        return rule in self._warned

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

    def _finding(self, name: str, guard: Guard, metrics: Mapping[str, float]) -> Finding:
        rows = f" for {guard.updates} updates" if guard.updates > 1 else ""
        evidence = (
            f"{guard.metric} is {metrics[guard.metric]:.3g}, {guard.side} "
            f"{self._limit(guard, metrics):.3g}{rows} ({guard.rule})"
        )
        advice = f"{guard.words} {guard.note(self._config)}".rstrip()
        return Finding(rule=name, evidence=evidence, advice=advice, source=guard.source)

    def _limit(self, guard: Guard, metrics: Mapping[str, float]) -> float:
        first = self._first.get(guard.metric, math.nan)
        if not math.isfinite(first):
            first = self._first[guard.metric] = metrics[guard.metric]
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
                f"(max_skipped_steps={self._config.max_skipped_steps}). The weights are unchanged "
                "since the last good step. Check the last scores, lower learning_rate or set "
                "bf16=False, and start a new run with the latest checkpoint as the initial policy."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, serializable as JSON."""
        return {
            "first": dict(self._first),
            "in_a_row": dict(self._in_a_row),
            "warned": sorted(self._warned),
            "drop": self._drop.state_dict(),
            "skipped": self._skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; older checkpoints have only "in_a_row" and some of the rest."""
        self._in_a_row.update(state["in_a_row"])
        # Without "skipped", steps that were skipped before have already caused the warning.
        self._skipped = state.get("skipped", 0.0)
        if "drop" in state:
            self._drop.load_state_dict(state["drop"])
        if "first" in state:
            self._first, self._warned = dict(state["first"]), set(state["warned"])
            return
        length = state["first_length"]
        self._first = {} if length is None else {"val/response_length": length}
        self._warned = {n for n, guard in GUARDS.items() if self._in_a_row[n] >= guard.updates}
        self._in_a_row |= dict.fromkeys(self._warned, 0)
