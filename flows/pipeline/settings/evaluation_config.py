"""Settings of the evaluation, and of the choice of the policy to register."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from ppo_core.config.field_checks import check_fields, require
from ppo_core.errors import ConfigError
from ppo_core.io.validation import Count, Natural, NotNegative, Share, ShareAbove0, ShareBelow1

_WEIGHTS = [1.0, 0.8, 0.6, 0.4]

MOST_TRIES = 6
"""Maximum number of policies that are measured to find one near the limit of the KL divergence."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Number of prompts, decoding of the answers, and limits of a conclusive result.

    Raises:
        ConfigError: a value is out of range.
    """

    num_examples: Count = 1_024
    """Maximum number of evaluation prompts to answer. The first rows are used, except for the
    fraction `rotate`. The judge compares the answers in batches, and stops when the comparison is
    decided at the level `promotion.alpha`."""

    rotate: ShareBelow1 = 0.0
    """Fraction of the answered rows that is drawn at random for each champion, so that successive
    champions are not all selected on the same prompts. The other answered rows are the first rows
    of `eval_prompts`, which must be set. The random rows are drawn from the remaining rows; there
    must be at least twice as many remaining rows as random rows."""

    temperature: NotNegative = 0.7
    """Temperature of the answers; 0 always takes the likeliest token."""

    top_k: Natural = 0
    """Sample from this number of likeliest tokens; 0 samples from all tokens."""

    top_p: ShareAbove0 = 1.0
    """Sample from the likeliest tokens with this total probability; 1 samples from all tokens."""

    baseline_prompts: Natural = 128
    """Maximum number of prompts on which PPO is compared with two baselines: SFT's greedy answer,
    and the sample that the reward model scores highest among four samples of SFT. The prompts are
    the first that the judge compared for the promotion decision. No decision depends on the
    comparison with the baselines. 0 compares nothing."""

    max_invalid: ShareBelow1 = 0.05
    """Maximum fraction of pairs without a verdict; above it, the result is inconclusive."""

    max_flip_rate: Share = 0.5
    """Maximum fraction of pairs in which the judge's verdict follows the position of the answers;
    above it, the result is inconclusive."""

    human_labels: str = ""
    """Rows with prompt, first, second and a person's label (first, second or tie), and optionally
    the id of this person (annotator). The judge also labels these pairs, and its agreement with
    people is reported. If empty, the agreement is not measured."""

    min_kappa: Annotated[float, Field(ge=-1, le=1, description="between -1 and 1")] = 0.2
    """Minimum Cohen's kappa of the judge and `human_labels`; below it, the result is inconclusive.
    The default is the upper end of what Landis and Koch (1977) call slight agreement."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)
        if self.min_kappa != EvaluationConfig.min_kappa and not self.human_labels:
            raise ConfigError(
                f"min_kappa={self.min_kappa:g} would be ignored, because there are no human_labels "
                "to compare the judge with. Set human_labels to their file, or remove min_kappa."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether each answer takes the likeliest tokens, so that repeated answers are equal."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Choice of the policy of PPO to evaluate and register.

    Raises:
        ConfigError: a value is out of range.
    """

    method: Literal["last", "kl", "judge"] = "last"
    """`last` registers the last policy. `kl` registers a policy nearer to SFT if the KL divergence
    of the last policy from SFT exceeds the limit; with `ppo.kl_target`, also a policy slightly
    further from SFT if the divergence is below 0.9 times the limit. `judge` takes the policies at
    `weights` and the earlier policies of `ppo.save_policies`. Of the policies whose KL divergence
    is within the limit, it registers the one that the judge most often prefers to SFT. The
    comparison uses up to `num_prompts` prompts, at most half of `eval_prompts`; the evaluation does
    not use these prompts. The limit is the smaller of 1.1 x `ppo.kl_target` and 0.9 x
    `promotion.max_kl`."""

    weights: list[float] = field(default_factory=_WEIGHTS.copy)
    """Positions of the policies that the judge compares with SFT: 1 is the end of PPO, and 0 would
    be SFT. A policy between SFT and the end has interpolated parameters."""

    num_prompts: Count = 128
    """Maximum number of prompts that are answered for the choice."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)
        are_numbers = all(isinstance(each, int | float) for each in self.weights)
        is_valid = are_numbers and all(0 < each <= 1 for each in self.weights)
        what = "at least one number above 0 and at most 1, such as [1.0, 0.8, 0.6]"
        require(self, "weights", bool(self.weights) and is_valid, what)
        self._refuse_what_has_no_effect()

    def _refuse_what_has_no_effect(self) -> None:
        users = {
            "weights": (_WEIGHTS, ("judge",)),
            "num_prompts": (SelectionConfig.num_prompts, ("judge", "kl")),
        }
        for name, (default, methods) in users.items():
            if (value := getattr(self, name)) != default and self.method not in methods:
                raise ConfigError(
                    f"{name}={value!r} would be ignored, because method={self.method!r} does not "
                    f"use it. Set method={methods[0]!r}, or remove {name}."
                )
