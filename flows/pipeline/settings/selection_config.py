"""Settings for choosing the policy to register: a policy of PPO, or a mix of start and end."""

from dataclasses import dataclass, field
from typing import Literal

from ppo_core.config.field_checks import check_fields, require
from ppo_core.io.validation import Count

MOST_TRIES = 6
"""Maximum number of policies that are measured to find one near the limit of the KL divergence."""


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Choice of the policy of PPO to evaluate and register.

    Raises:
        ConfigError: a value is out of range.
    """

    method: Literal["last", "kl", "judge"] = "last"
    """`last` registers the last policy. `kl` registers a policy nearer to SFT if the KL divergence
    of the last policy from SFT exceeds the limit. `judge` compares the policies at `weights`, and
    the earlier policies of `ppo.save_policies`, whose KL divergence is within the limit, and
    registers the policy that the judge most often prefers to SFT. The comparison uses up to
    `num_prompts` prompts, at most half of `eval_prompts`; the evaluation does not use these
    prompts. The limit is the smaller of 1.1 x `ppo.kl_target` and 0.9 x `promotion.max_kl`."""

    weights: list[float] = field(default_factory=lambda: [1.0, 0.8, 0.6, 0.4])
    """Positions of the policies that the judge compares with SFT: 1 is the end of PPO, and 0 would
    be SFT. A policy between them has interpolated weights."""

    num_prompts: Count = 128
    """Maximum number of prompts that are answered for the choice."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)
        are_numbers = all(isinstance(each, int | float) for each in self.weights)
        is_valid = are_numbers and all(0 < each <= 1 for each in self.weights)
        what = "at least one number above 0 and at most 1, such as [1.0, 0.8, 0.6]"
        require(self, "weights", bool(self.weights) and is_valid, what)
