"""Limits for the automatic promotion of a policy."""

from dataclasses import dataclass

from ppo_core.config.checks import require


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
