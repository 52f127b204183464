"""Limits that a reward model must meet before PPO, and a policy before its promotion."""

from dataclasses import dataclass

from ppo_core.config.checks import require, require_count, require_finite


@dataclass(frozen=True, kw_only=True)
class RewardGateConfig:
    """Samples for validating the reward model, and the limits of its gate.

    Raises:
        ConfigError: a value is out of range.
    """

    min_best_of_4: float = 0.5
    """How often the judge must prefer the best of four samples, chosen by the reward model, to
    another sample: the lower end of the 95 % interval must exceed the limit."""

    min_accuracy: float = 0.55
    """Accuracy on held-out pairs that the lower end of the 95 % interval must reach. A model that
    chooses well among the policy's samples is only warned of."""

    max_calibration_error: float = 0.3
    """Maximum expected calibration error of sigmoid(margin) for an overconfident model. An
    underconfident model passes, because its rewards are small but not wrong."""

    max_length_correlation: float = 0.8
    """Maximum absolute Spearman correlation of a response's score with its number of characters."""

    min_shorter_accuracy: float = 0.25
    """Accuracy, on pairs whose shorter response is preferred, that the upper end of the 95 %
    interval must reach."""

    min_sample_deviation: float = 0.05
    """Minimum standard deviation of the scores of the SFT policy's samples."""

    max_degenerate_preferred: float = 0.6
    """Fraction of references for which a degenerate version scores above its rivals; an indifferent
    model has about a third. The lower end of the 95 % interval must not exceed the limit."""

    tolerance: float = 1e-3
    """Maximum difference of a text's scores between batches, and between left and right padding,
    as a fraction of the standard deviation of the held-out scores."""

    num_prompts: int = 64
    """Number of prompts for sampling the SFT policy; the first prompts are used."""

    max_prompts: int = 256
    """Maximum number of prompts whose samples the judge compares; more than `num_prompts` are
    sampled only while `min_best_of_4` is not decided."""

    samples_per_prompt: int = 8
    """Number of samples per prompt, and the largest K of the best-of-K curve."""

    unit_deviation: bool = False
    """Whether to scale the reward so that the SFT policy's samples have standard deviation 1."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        require_finite(self)
        for name in (
            "min_best_of_4",
            "min_accuracy",
            "max_calibration_error",
            "max_length_correlation",
            "min_shorter_accuracy",
            "max_degenerate_preferred",
        ):
            require(self, name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        require(self, "min_sample_deviation", self.min_sample_deviation >= 0, "at least 0")
        require(self, "tolerance", self.tolerance > 0, "above 0")
        require_count(self, "num_prompts")
        require_count(self, "max_prompts")
        # The best of four is compared with a fifth sample.
        require(self, "samples_per_prompt", self.samples_per_prompt >= 5, "at least 5")


@dataclass(frozen=True, kw_only=True)
class PromotionConfig:
    """Limits of the promotion gate.

    `max_invalid` of the evaluation limits invalid verdicts. An evaluation above this limit is
    inconclusive, and an inconclusive evaluation never promotes a policy.

    Raises:
        ConfigError: a value is out of range.
    """

    min_win_rate: float = 0.5
    """Win rate against the champion (SFT if there is no champion) that the lower end of the 95 %
    interval must exceed."""

    min_reference_win_rate: float = 0.5
    """Win rate against the references that the lower end of the 95 % interval must exceed."""

    max_kl: float = 20.0
    """Maximum KL divergence from SFT in nats per answer. Above 10 to 20 nats, the policy usually
    exploits the reward model; see the README's table of metrics."""

    max_length_ratio: float = 2.0
    """Maximum ratio of the mean answer lengths in words of the policy and the champion (SFT if
    there is no champion), the longer divided by the shorter."""

    max_repetition: float = 0.3
    """Maximum mean fraction of an answer's word 3-grams that repeat an earlier 3-gram; equal
    answers count once."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        for name in ("min_win_rate", "min_reference_win_rate"):
            require(self, name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        require(self, "max_kl", self.max_kl > 0, "above 0")
        require(self, "max_length_ratio", self.max_length_ratio >= 1, "at least 1")
        require(self, "max_repetition", 0 <= self.max_repetition <= 1, "between 0 and 1")
