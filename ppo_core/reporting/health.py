"""Guards that tell a person what is going wrong in a run, and what to change."""

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
    """On which side of the limit the metric is bad."""

    limit: Callable[[PPOConfig, float], float]
    """The limit, by the settings and the response length of the first update."""

    rule: str
    """Where the limit comes from: the setting's name, and what is made of it."""

    updates: int = 1
    """Updates in a row that it must be bad in before it is worth a warning."""

    words: str
    """What that probably means, and what to change."""

    def is_bad(self, value: float, limit: float) -> bool:
        """Whether the value is on the wrong side; NaN is on neither."""
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
        limit=lambda config, _: config.warn_entropy,
        rule="warn_entropy",
        words="The policy has nearly stopped choosing: it writes the same again and again and "
        "explores nothing more. Go back to an earlier checkpoint with a lower learning_rate, a "
        "higher kl_coef or a higher temperature.",
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
        limit=lambda config, first_length: config.warn_length_growth * first_length,
        rule="warn_length_growth x the first update's",
        words="The reward model probably prefers long responses, whatever they say. Read some; "
        "set length_penalty or overlong_buffer, or missing_eos_penalty if they do not end.",
    ),
    "repetition": Guard(
        metric="val/repetition",
        side="above",
        limit=lambda config, _: config.warn_repetition,
        rule="warn_repetition",
        words="Responses repeat themselves, and the reward model lets them. Read some; raise "
        "kl_coef, lower learning_rate, or mend the reward model.",
    ),
}


class HealthMonitor:
    """Warns once when a guard's condition begins, and again when it ended and came back."""

    def __init__(self, config: PPOConfig) -> None:
        """Take the thresholds from the settings."""
        self._config = config
        self._first_length: float | None = None
        self._in_a_row = dict.fromkeys(GUARDS, 0)

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """The warnings that begin with this update's metrics.

        A metric that an update did not measure, as those of the policy while the critic warms
        up, leaves its guards as they were.
        """
        if self._first_length is None:
            self._first_length = metrics.get("val/response_length")
        warnings = []
        for name, guard in GUARDS.items():
            if guard.metric not in metrics:
                continue
            value = metrics[guard.metric]
            limit = guard.limit(self._config, self._first_length or 0.0)
            self._in_a_row[name] = self._in_a_row[name] + 1 if guard.is_bad(value, limit) else 0
            if self._in_a_row[name] == guard.updates:
                warnings.append(_message(name, guard, value, limit))
        return warnings

    def check_skipped(self, in_a_row: int) -> None:
        """End the run after too many optimizer steps that were skipped one after the other.

        Raises:
            TrainingError: there were `max_skipped_steps` or more.
        """
        if in_a_row >= self._config.max_skipped_steps:
            raise TrainingError(
                f"{in_a_row} steps in a row had a score, a loss or a gradient that is not finite "
                f"(max_skipped_steps={self._config.max_skipped_steps}). None of them was taken: "
                "the weights are as after the last good step. Look at the last scores, lower "
                "learning_rate, or set bf16=False, and start a new run from the latest "
                "checkpoint, which loads as a model."
            )

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on from here, as JSON takes it."""
        return {"first_length": self._first_length, "in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self._first_length = state["first_length"]
        self._in_a_row.update(state["in_a_row"])


def _message(name: str, guard: Guard, value: float, limit: float) -> str:
    rows = f" for {guard.updates} updates" if guard.updates > 1 else ""
    return (
        f"{name.capitalize()}: {guard.metric} is {value:.3g}, {guard.side} {limit:.3g}{rows} "
        f"({guard.rule}). {guard.words}"
    )
