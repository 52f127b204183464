"""Limits for promoting a policy without a person."""

from dataclasses import dataclass

from ppo_core.config.checks import require


@dataclass(frozen=True, kw_only=True)
class PromotionConfig:
    """Limits of the promotion gate.

    The limit of invalid verdicts is `max_invalid` of the evaluation: above it the evaluation is
    inconclusive, and an inconclusive evaluation promotes nothing.

    Raises:
        ConfigError: a value is out of range.
    """

    min_win_rate: float = 0.5
    """Share of wins against the champion, or SFT where there is none yet, that the lower end of
    the 95 % interval must be above."""

    min_reference_win_rate: float = 0.5
    """The same against the references."""

    max_kl: float = 20.0
    """Most nats of an answer between the policy and SFT. Above 10 to 20 a reward model is usually
    being exploited, as the README's table of metrics says."""

    max_length_ratio: float = 2.0
    """Most times that the answers may be as long as those of the champion, or of SFT, in words on
    average; and most times that those may be as long as they are."""

    max_repetition: float = 0.3
    """Largest share of an answer's 3-grams of words that repeat one before them, on average."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        for name in ("min_win_rate", "min_reference_win_rate"):
            require(self, name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        require(self, "max_kl", self.max_kl > 0, "above 0")
        require(self, "max_length_ratio", self.max_length_ratio >= 1, "at least 1")
        require(self, "max_repetition", 0 <= self.max_repetition <= 1, "between 0 and 1")
