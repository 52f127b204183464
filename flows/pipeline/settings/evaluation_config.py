"""Settings of the evaluation."""

from dataclasses import dataclass

from ppo_core.config.checks import require, require_count, require_finite


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Number of prompts, decoding of the answers, and limits of a conclusive result.

    Raises:
        ConfigError: a value is out of range.
    """

    num_examples: int = 200
    """Maximum number of rows of `eval_prompts` to answer and judge; the first rows are used."""

    temperature: float = 0.7
    """Temperature of the answers; 0 always takes the likeliest token."""

    top_k: int = 0
    """Sample from this number of likeliest tokens; 0 samples from all tokens."""

    top_p: float = 1.0
    """Sample from the likeliest tokens with this total probability; 1 samples from all tokens."""

    max_invalid: float = 0.05
    """Maximum fraction of pairs without a verdict; above it, the result is inconclusive."""

    max_flip_rate: float = 0.5
    """Maximum fraction of pairs in which the judge follows the position of the answers; above it,
    the result is inconclusive."""

    human_labels: str = ""
    """Rows with prompt, first, second and a person's label (first, second or tie). The judge
    labels these pairs as well, and its agreement with people is reported. Empty for none."""

    min_kappa: float = 0.2
    """Minimum Cohen's kappa of the judge and `human_labels`; below it, the result is inconclusive.
    The default is the upper end of what Landis and Koch (1977) call slight agreement."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        require_finite(self)
        require_count(self, "num_examples")
        require(self, "temperature", self.temperature >= 0, "at least 0")
        require(self, "top_k", self.top_k >= 0, "at least 0")
        require(self, "top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        require(self, "max_invalid", 0 <= self.max_invalid < 1, "at least 0 and below 1")
        require(self, "min_kappa", -1 <= self.min_kappa <= 1, "between -1 and 1")
        require(self, "max_flip_rate", 0 <= self.max_flip_rate <= 1, "between 0 and 1")
