"""Settings of the labeled pairs of the policy's own samples."""

from dataclasses import dataclass

from ppo_core.config.field_checks import check_fields
from ppo_core.errors import ConfigError
from ppo_core.io.validation import Count, Natural, NotNegative, Share

PEOPLE = "people"
"""Value of `labeller`: the run writes the pairs to a file and ends; people then label the pairs."""

LEAST_PAIRS = 20
"""Minimum number of pairs with a preference; fewer pairs cannot be split into training and test."""


@dataclass(frozen=True, kw_only=True)
class FreshPairsConfig:
    """How many pairs of the policy's own samples train the reward model, and who labels the pairs.

    Raises:
        ConfigError: a value is out of range, or two settings contradict each other.
    """

    count: Natural = 0
    """Number of pairs; with 0, none are sampled. The pairs are spread evenly over `prompts`, and
    over the `rounds`."""

    labeller: str = ""
    """Who decides which answer is better: `people`, or a judge, in the form of the setting `judge`
    but not the judge of the run. With `people`, the run writes `to-label.jsonl` and ends."""

    labels: str = ""
    """Rows with prompt, first, second and label (first, second or tie), such as `to-label.jsonl`
    with the labels of people. If set, no pairs are sampled."""

    given_weight: NotNegative = 0.0
    """Weight of each pair of `preferences` in the loss of the reward model; a pair of samples has
    weight 1. With 0, the pairs of `preferences` do not train this model."""

    enough_agreement: Share = 0.85
    """No pairs are labeled if the reward model and the run's judge agree on more than this fraction
    of pairs, because labels would then gain little. The agreement is measured on samples of the SFT
    policy before anybody labels; the lower end of its 95 % interval must be above this number.
    Pairs are labeled in any case if the number is 1, if there are several rounds or machines, or if
    `judge` is empty or its API key is missing in this step."""

    rounds: Count = 1
    """Number of times that pairs are labeled: first samples of the SFT policy, then samples of the
    current policy, for which PPO pauses. Each time, a reward model is trained on all pairs so far.
    PPO continues with this model, unless the previous reward model is ahead on the held-out pairs
    of that round by more than one standard error. `labeller` must be a judge if there are several
    rounds; the limits of [judging] apply to each round."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range, or the labeler is missing."""
        check_fields(self)
        if bool(self.count) != bool(self.labeller):
            raise ConfigError(
                f"count={self.count} and labeller={self.labeller!r} need each other. Set both, or "
                "remove both."
            )
        if self.labels and self.labeller not in ("", PEOPLE):
            raise ConfigError(
                f"labels={self.labels!r} would be ignored, because labeller={self.labeller!r} "
                f"labels the pairs. Set labeller={PEOPLE!r}, or remove labels."
            )
        if self.given_weight and not self.wanted:
            raise ConfigError(
                f"given_weight={self.given_weight:g} would be ignored, because there are no pairs "
                "of samples beside the given pairs. Set count and labeller, or remove given_weight."
            )
        if self.enough_agreement != FreshPairsConfig.enough_agreement and not self.wanted:
            raise ConfigError(
                f"enough_agreement={self.enough_agreement:g} would be ignored, because no pairs of "
                "samples are labeled. Set count and labeller, or remove enough_agreement."
            )
        if self.rounds > 1:
            self._check_rounds()

    def _check_rounds(self) -> None:
        if not self.judge:
            raise ConfigError(
                f"rounds={self.rounds} needs a labeller that answers while PPO pauses, but "
                f"labeller={self.labeller!r} and labels={self.labels!r}: people label after the "
                "run has ended. Set labeller to a judge, or rounds=1."
            )
        if self.count < self.rounds * LEAST_PAIRS:
            raise ConfigError(
                f"count={self.count} pairs over rounds={self.rounds} are fewer than "
                f"{LEAST_PAIRS} pairs a round, too few to train a reward model. Raise count to at "
                f"least {self.rounds * LEAST_PAIRS}, or lower rounds."
            )

    @property
    def judge(self) -> str:
        """The labeler if it is a judge; empty if people label or if there is no labeler."""
        return "" if self.labeller == PEOPLE else self.labeller

    @property
    def wanted(self) -> bool:
        """Whether the reward model is trained on labeled pairs of samples."""
        return bool(self.count or self.labels)
