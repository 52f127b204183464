"""Limits that a reward model must meet before PPO, and a policy before its promotion."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ppo_core.config.checks import check_fields
from ppo_core.errors import ConfigError
from ppo_core.io.validation import (
    Count,
    ErrorRate,
    NotNegative,
    Positive,
    PositiveOrInf,
    Share,
    ShareBelow1,
)


@dataclass(frozen=True, kw_only=True)
class RewardGateConfig:
    """Samples for validating the reward model, and the limits of its gate.

    Raises:
        ConfigError: a value is out of range.
    """

    min_best_of_4: Share = 0.5
    """Fraction of prompts for which the judge must prefer the reward model's best of four samples
    to another sample. The lower end of the 95 % interval must exceed this limit."""

    min_accuracy: Share = 0.55
    """Accuracy on held-out pairs that the lower end of the 95 % interval must reach. If the judge
    has compared samples (`min_best_of_4`), a lower accuracy only causes a warning."""

    max_calibration_error: Share = 0.3
    """Maximum expected calibration error of sigmoid(margin) for an overconfident model. The limit
    does not apply to an underconfident model, because its rewards are small but not wrong."""

    max_length_correlation: Share = 0.8
    """Maximum absolute Spearman correlation of a response's score with its length in characters."""

    min_shorter_accuracy: Share = 0.25
    """Accuracy on pairs in which people prefer the shorter response. The upper end of the 95 %
    interval must reach this limit."""

    min_sample_deviation: NotNegative = 0.05
    """Minimum standard deviation of the scores of the SFT policy's samples."""

    max_degenerate_preferred: Share = 0.6
    """Maximum fraction of references for which a degenerate version scores above its rivals; about
    a third for an indifferent model. The lower end of the 95 % interval must not exceed it."""

    tolerance: Positive = 1e-3
    """Maximum difference of a text's scores between batches, and between left and right padding,
    as a fraction of the standard deviation of the held-out scores."""

    num_prompts: Count = 64
    """Number of prompts for which the SFT policy is sampled; the first prompts are used."""

    max_prompts: Count = 256
    """Maximum number of prompts whose samples the judge compares. More than `num_prompts` prompts
    are sampled only while the comparison with `min_best_of_4` is undecided."""

    samples_per_prompt: Annotated[int, Field(ge=5)] = 8
    """Number of samples per prompt, and the largest K of the best-of-K curve. The best of four
    samples is compared with a fifth sample."""

    unit_deviation: bool = False
    """Whether to scale the reward so that the SFT policy's samples have standard deviation 1."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)


GAIN = 0.05
"""Difference between the win rate to exceed and the default of `min_gain`."""


@dataclass(frozen=True, kw_only=True)
class PromotionConfig:
    """Limits of the promotion gate.

    The limit of invalid verdicts is `max_invalid` of the evaluation. An evaluation above this limit
    is inconclusive, and an inconclusive evaluation never promotes a policy.

    Raises:
        ConfigError: a value is out of range.
    """

    min_win_rate: ShareBelow1 = 0.5
    """Win rate against the champion (SFT if there is no champion) that the policy must exceed."""

    min_reference_win_rate: ShareBelow1 = 0.5
    """Win rate against the references that the policy must exceed."""

    alpha: ErrorRate = 0.001
    """Largest probability of promoting a policy that does not exceed `min_win_rate`. The judge is
    asked until this is shown, until a rate of `min_gain` is implausible, or for all prompts."""

    false_promotion_rate: ErrorRate | None = None
    """Largest expected fraction of false promotions among all promotions of the registered model.
    If set, the alpha of each decision follows from the number of earlier decisions and promotions,
    and `alpha` does not apply."""

    min_gain: ShareBelow1 | None = None
    """Win rate that is worth a promotion: once the rate is shown to be lower, the judge is asked no
    further. None: 0.05 above the win rate that the policy must exceed, or half of the distance to 1
    if that is less."""

    max_kl: PositiveOrInf = 20.0
    """Maximum KL divergence from SFT in nats per answer. Above 10 to 20 nats, the policy usually
    exploits the reward model; see the README's table of metrics."""

    max_length_ratio: Annotated[float, Field(ge=1, allow_inf_nan=True)] = 2.0
    """Maximum ratio of the mean answer lengths of the policy and of the champion (SFT if there is
    no champion), in words: the longer length divided by the shorter length."""

    max_repetition: Share = 0.3
    """Maximum mean fraction of an answer's word 3-grams that repeat an earlier 3-gram; equal
    answers count once."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range, or `min_gain` is not above what must be exceeded."""
        check_fields(self)
        for name in ("min_win_rate", "min_reference_win_rate"):
            least = getattr(self, name)
            if self.min_gain is not None and self.min_gain <= least:
                raise ConfigError(
                    f"min_gain={self.min_gain:g} is not above {name}={least:g}, so the judge could "
                    f"stop at a policy that exceeds {name}. Raise min_gain, or leave it out."
                )

    def gain_above(self, least: float) -> float:
        """Return the win rate that is worth a promotion if `least` must be exceeded."""
        if self.min_gain is None:
            return least + min(GAIN, (1 - least) / 2)
        return self.min_gain
