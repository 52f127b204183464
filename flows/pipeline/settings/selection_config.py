"""Settings of the choice between the start and the end of PPO."""

from dataclasses import dataclass, field
from typing import Literal

from ppo_core.config.checks import check_fields, require
from ppo_core.io.validation import Count

MOST_TRIES = 6
"""Largest number of policies that are measured to get near the limit of the KL divergence."""


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Which policy is evaluated and registered, of those between the start and the end of PPO.

    Raises:
        ConfigError: a value is out of range.
    """

    method: Literal["last", "kl", "judge"] = "last"
    """`last`: register the last policy. `kl`: if its KL divergence from SFT exceeds the limit,
    register one nearer to SFT. `judge`: register the policy at `weights`, within the limit, that
    the judge most often prefers to SFT, on up to `num_prompts` and half of `eval_prompts`, which
    the evaluation then does not use. The limit is the smaller of 1.1 x `ppo.kl_target` and 0.9 x
    `promotion.max_kl`."""

    weights: list[float] = field(default_factory=lambda: [1.0, 0.8, 0.6, 0.4])
    """Positions of the policies that the judge compares with SFT: 1 is the end of PPO, and 0 would
    be SFT. A policy between them has interpolated weights."""

    num_prompts: Count = 128
    """Largest number of prompts that are answered for the choice."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)
        are_numbers = all(isinstance(each, int | float) for each in self.weights)
        is_valid = are_numbers and all(0 < each <= 1 for each in self.weights)
        what = "at least one number above 0 and at most 1, such as [1.0, 0.8, 0.6]"
        require(self, "weights", bool(self.weights) and is_valid, what)
