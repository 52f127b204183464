"""Settings of supervised training in the flow, and of LoRA adapters in all trainings."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from ppo_core.config.field_checks import check_fields, require
from ppo_core.config.script_arguments import ALL_LINEAR, check_target_modules
from ppo_core.errors import ConfigError
from ppo_core.errors.packages import require_package
from ppo_core.io.validation import Count, Natural, ShareBelow1
from ppo_core.supervised.supervised_config import SupervisedConfig

SEEDS_APART = 1_000_003
"""Difference between the seeds of two successive members of the reward model."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters on a frozen model (LoRA, arXiv:2106.09685); with r = 0, there are no adapters.

    Raises:
        ConfigError: a value is out of range or has no effect, or the package peft is missing.
    """

    r: Natural = 0
    """Rank of the adapters; 0 trains all parameters."""

    alpha: Count = 32
    """Numerator of the adapters' scale, alpha / r."""

    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Names of the modules that get adapters. The single entry `all-linear` selects every linear
    layer except the output head."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)
        names = self.target_modules
        require(self, "target_modules", bool(names) and all(names), "a list of names")
        check_target_modules("target_modules", names)
        if self.r == 0:
            self._refuse_what_has_no_effect()
        else:
            require_package("peft", extra="peft", needed_by=f"r={self.r}")

    def _refuse_what_has_no_effect(self) -> None:
        defaults = {one.name: one.default for one in fields(self)}
        defaults["target_modules"] = [ALL_LINEAR]  # the field has a default_factory, no default
        for name, default in defaults.items():
            if (value := getattr(self, name)) != default:
                raise ConfigError(
                    f"{name}={value!r} would be ignored, because r = 0 trains without adapters. "
                    "Set r to the rank of the adapters, or remove the setting."
                )


@dataclass(frozen=True, kw_only=True)
class LoraConfig(AdapterConfig):
    """Adapters that PPO trains instead of all parameters of the policy.

    Dropout has no setting, because PPO sets all dropout to 0. With dropout, the policy in the loss
    would differ from the policy that sampled the responses.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the frozen policy in PPO; bfloat16 halves its memory. Adapters are always
    trained in float32. With bfloat16, also set ppo.bf16 to true, to compute in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class SupervisedLoraConfig(AdapterConfig):
    """Adapters that SFT or reward model training trains, and then merges into the model."""

    dropout: ShareBelow1 = 0.05
    """Dropout probability at the input of the adapters."""


@dataclass(frozen=True, kw_only=True)
class SupervisedSection(SupervisedConfig):
    """Settings of one supervised training, and of its adapters."""

    lora: SupervisedLoraConfig = field(default_factory=SupervisedLoraConfig)
    """Adapters that are trained instead of all parameters."""

    def training_settings(self) -> dict[str, Any]:
        """Return the settings of a `SupervisedConfig`."""
        return {one.name: getattr(self, one.name) for one in fields(SupervisedConfig)}

    def lora_arguments(self) -> dict[str, Any] | None:
        """Return the arguments of `peft.LoraConfig`; None without adapters."""
        if self.lora.r == 0:
            return None
        return {
            "r": self.lora.r,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": self.lora.dropout,
            "target_modules": self.lora.target_modules,
        }


@dataclass(frozen=True, kw_only=True)
class RewardTrainingSection(SupervisedSection):
    """Settings of the training of the reward model."""

    members: Count = 1
    """Number of reward models that are trained from the same pairs, and differ in the initial
    weights of the head and in the order of the pairs. The mean of their scores is the reward."""

    def settings_of_result(self) -> dict[str, Any]:
        """Return the settings that change the result of one training by more than rounding."""
        given = super().settings_of_result()
        del given["members"]
        return given

    def of_member(self, number: int) -> "RewardTrainingSection":
        """Return the settings of a member, counted from 1; the first has the seed of the section.

        The seeds are far apart, so that they differ from the seeds of other runs.
        """
        return replace(self, seed=(self.seed + (number - 1) * SEEDS_APART) % 2**32)
