"""Settings of the labeled pairs of the policy's own samples."""

from dataclasses import dataclass

from ppo_core.config.checks import check_fields
from ppo_core.errors import ConfigError
from ppo_core.io.validation import Natural

PEOPLE = "people"
"""Value of `labeller`: the run writes the pairs to a file and ends; people then label the pairs."""


@dataclass(frozen=True, kw_only=True)
class FreshPairsConfig:
    """Number of pairs of the policy's own samples that train the reward model, and their labeler.

    Raises:
        ConfigError: a value is out of range, or two settings contradict each other.
    """

    count: Natural = 0
    """Number of pairs; with 0, none are sampled. The pairs are spread evenly over `prompts`."""

    labeller: str = ""
    """Who decides which answer is better: a judge in the form of the setting `judge`, but never the
    judge of the run; or `people`. With `people`, the run writes `to-label.jsonl` and ends."""

    labels: str = ""
    """Rows with prompt, first, second and label (first, second or tie), such as `to-label.jsonl`
    with the labels of people. If set, no pairs are sampled."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range, or the labeler is missing."""
        check_fields(self)
        if bool(self.count) != bool(self.labeller):
            raise ConfigError(
                f"count={self.count} and labeller={self.labeller!r}: pairs need a labeller, and a "
                "labeller pairs. Set both, or neither."
            )
        if self.labels and self.labeller not in ("", PEOPLE):
            raise ConfigError(
                f"labels={self.labels!r} would be ignored, because labeller={self.labeller!r} "
                f"labels the pairs. Set labeller={PEOPLE!r}, or remove labels."
            )

    @property
    def judge(self) -> str:
        """The labeler if it is a judge; empty if people label or if there is no labeler."""
        return "" if self.labeller == PEOPLE else self.labeller

    @property
    def wanted(self) -> bool:
        """Whether the reward model is trained on such pairs."""
        return bool(self.count or self.labels)
