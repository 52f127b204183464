"""Settings of the validation of the reward model."""

from dataclasses import dataclass

from ppo_core.config.checks import require, require_count


@dataclass(frozen=True, kw_only=True)
class RewardGateConfig:
    """What the reward model is measured on, and the limits of its gate.

    Raises:
        ConfigError: a value is out of range.
    """

    min_accuracy: float = 0.55
    """Accuracy on held-out pairs that the lower end of its 95 % interval must reach."""

    max_calibration_error: float = 0.3
    """Largest expected calibration error of sigmoid(margin) of a model that is too sure of itself;
    one that claims less than it knows pays small rewards, not wrong ones."""

    max_length_correlation: float = 0.8
    """Largest Spearman correlation, either way, of a response's score with its characters."""

    min_shorter_accuracy: float = 0.25
    """Accuracy on pairs whose shorter response is preferred that the upper end of its 95 %
    interval must reach."""

    min_sample_deviation: float = 0.05
    """Smallest standard deviation of the scores of the SFT policy's samples."""

    max_degenerate_preferred: float = 0.6
    """Share of the references for which a degenerate version scores above all of its rivals, a
    third for a model that cannot tell; refused where the lower end of its 95 % interval is above
    the limit."""

    tolerance: float = 1e-3
    """Largest difference of a text's scores between batches and between sides of padding, as a
    share of the deviation of the held-out scores."""

    num_prompts: int = 64
    """Most prompts that the SFT policy is sampled on, from the first on."""

    samples_per_prompt: int = 8
    """Samples of each of these prompts: the K of the best-of-K curve."""

    unit_deviation: bool = False
    """Scale the reward so that the SFT policy's samples have a standard deviation of 1."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        for name in (
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
        require(self, "samples_per_prompt", self.samples_per_prompt >= 2, "at least 2")
