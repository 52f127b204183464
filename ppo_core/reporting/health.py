"""Warnings about the metrics of a run: which limit one has crossed, and what to change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A metric that must not cross a limit."""

    metric: str

    side: Literal["above", "below"]
    """The side of the limit that the metric must not be on."""

    limit: Callable[[PPOConfig, float], float]
    """Returns the limit from the settings and the metric's value in the first update."""

    rule: str
    """How the limit follows from a setting, for the message."""

    updates: int = 1
    """Consecutive updates in which the metric must be bad before the warning."""

    words: str
    """The probable cause, and what to change."""

    def is_bad(self, value: float, limit: float) -> bool:
        """Return whether the value is on the wrong side; NaN is on neither."""
        return value > limit if self.side == "above" else value < limit


GUARDS = {
    "far from reference": Guard(
        metric="objective/kl",
        side="above",
        limit=lambda config, _: config.warn_kl,
        rule="warn_kl",
        words="The policy is moving far from the reference: the reward pulls harder than the "
        "divergence holds, or the steps are too large. Raise kl_coef, set kl_target, or lower "
        "learning_rate; and read some responses, for the reward model may be being exploited.",
    ),
    "negative divergence": Guard(
        metric="objective/kl",
        side="below",
        limit=lambda config, _: -1.0,
        rule="a divergence cannot be negative, only its estimate by a little",
        words="Sampling and training probably disagree about the policy: restricted sampling, "
        "padding, dropout or a temperature that only one of them applies. Set top_k=0 and "
        "top_p=1, and look at val/first_ratio_error: it must be near 0.",
    ),
    "ratio too high": Guard(
        metric="val/ratio",
        side="above",
        limit=lambda config, _: config.warn_ratio,
        rule="warn_ratio",
        words="Within one update the policy left the one that was sampled from, so its estimates "
        "no longer hold. Lower learning_rate or num_ppo_epochs, or set ratio_threshold or "
        "target_kl; if val/first_ratio_error is not near 0, sampling and training disagree.",
    ),
    "ratio too low": Guard(
        metric="val/ratio",
        side="below",
        limit=lambda config, _: 1 / (5 * config.warn_ratio),
        rule="1 / (5 x warn_ratio)",
        words="Within one update the policy became unlikely to write what it had sampled. Lower "
        "learning_rate or num_ppo_epochs, or set target_kl; if val/first_ratio_error is not near "
        "0, sampling and training disagree.",
    ),
    "entropy collapse": Guard(
        metric="policy/entropy_avg",
        side="below",
        limit=lambda config, first: config.warn_entropy * first,
        rule="warn_entropy x the first update's",
        words="The policy has nearly become deterministic: it samples the same response to a "
        "prompt again and again, and no longer explores. Go back to an earlier checkpoint with a "
        "lower learning_rate, a higher kl_coef or a higher temperature.",
    ),
    "critic explains nothing": Guard(
        metric="val/explained_variance",
        side="below",
        limit=lambda config, _: config.warn_explained_variance,
        rule="warn_explained_variance",
        updates=3,
        words="The critic predicts worse than a constant would, and makes the advantages noisier. "
        "Set critic_warmup_updates, change critic_learning_rate or raise vf_coef; if scores are "
        "large, set use_score_scaling.",
    ),
    "length growth": Guard(
        metric="val/response_length",
        side="above",
        limit=lambda config, first: config.warn_length_growth * first,
        rule="warn_length_growth x the first update's",
        words="The reward model probably prefers long responses, whatever their content. Read "
        "some; set length_penalty or overlong_buffer, or missing_eos_penalty if they do not end.",
    ),
    "repetition": Guard(
        metric="val/repetition",
        side="above",
        limit=lambda config, _: config.warn_repetition,
        rule="warn_repetition",
        words="Responses repeat themselves, and the reward model lets them. Read some; raise "
        "kl_coef, lower learning_rate, or correct the reward model.",
    ),
}


class HealthMonitor:
    """Warns once in a run about each guard's metric."""

    def __init__(self, config: PPOConfig) -> None:
        """Take the limits from the settings."""
        self._config = config
        self._first: dict[str, float] = {}
        self._in_a_row = dict.fromkeys(GUARDS, 0)
        self._warned: set[str] = set()

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the warnings that are due after an update with these metrics.

        The guards of a metric that the update did not measure keep their state.
        """
        warnings = []
        for name, guard in GUARDS.items():
            if guard.metric not in metrics:
                continue
            value = metrics[guard.metric]
            limit = guard.limit(self._config, self._first.setdefault(guard.metric, value))
            self._in_a_row[name] = self._in_a_row[name] + 1 if guard.is_bad(value, limit) else 0
            if self._in_a_row[name] >= guard.updates and name not in self._warned:
                self._warned.add(name)
                warnings.append(_message(name, guard, value, limit))
        return warnings

    def check_skipped(self, in_a_row: int) -> None:
        """Raise if too many optimizer steps in a row were skipped.

        Raises:
            TrainingError: `max_skipped_steps` or more were.
        """
        if in_a_row >= self._config.max_skipped_steps:
            raise TrainingError(
                f"{in_a_row} steps in a row had a score, a loss or a gradient that is not finite, "
                "or a mean ratio above ratio_threshold "
                f"(max_skipped_steps={self._config.max_skipped_steps}). All of them were skipped: "
                "the weights are as after the last good step. Look at the last scores, lower "
                "learning_rate, or set bf16=False, and start a new run from the latest "
                "checkpoint, which loads as a model."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, as JSON can hold it."""
        return {
            "first": dict(self._first),
            "in_a_row": dict(self._in_a_row),
            "warned": sorted(self._warned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, also the form without "first" and "warned"."""
        self._in_a_row.update(state["in_a_row"])
        if "first" in state:
            self._first, self._warned = dict(state["first"]), set(state["warned"])
            return
        length = state["first_length"]
        self._first = {} if length is None else {"val/response_length": length}
        self._warned = {n for n, guard in GUARDS.items() if self._in_a_row[n] >= guard.updates}


def _message(name: str, guard: Guard, value: float, limit: float) -> str:
    rows = f" for {guard.updates} updates" if guard.updates > 1 else ""
    return (
        f"{name.capitalize()}: {guard.metric} is {value:.3g}, {guard.side} {limit:.3g}{rows} "
        f"({guard.rule}). {guard.words}"
    )
