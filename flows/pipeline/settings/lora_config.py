"""Settings of the policy's LoRA adapters."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ppo_core.config.checks import require, require_count, require_finite
from ppo_core.config.script_arguments import ALL_LINEAR
from ppo_core.errors import ConfigError
from ppo_core.errors.packages import require_package

if TYPE_CHECKING:
    import peft


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters on a frozen policy (LoRA, arXiv:2106.09685), or none.

    Dropout has no setting, because PPO sets all dropout to 0: otherwise the policy in the loss
    would differ from the policy that sampled.

    Raises:
        ConfigError: a value is out of range or has no effect, or the package peft is missing.
    """

    r: int = 0
    """Rank of the adapters; 0 trains all parameters of the policy."""

    alpha: int = 32
    """Numerator of the adapters' scale, alpha / r."""

    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Names of the modules that get adapters; `all-linear`, as the only entry, selects every
    linear layer except the output head."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the frozen policy in PPO; bfloat16 halves its memory. Adapters are always
    trained in float32. With bfloat16, also set ppo.bf16 to true, to compute in bfloat16."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        require_finite(self)
        require(self, "r", self.r >= 0, "at least 0")
        require_count(self, "alpha")
        names = self.target_modules
        require(self, "target_modules", bool(names) and all(names), "a list of names")
        if ALL_LINEAR in names and len(names) > 1:
            raise ConfigError(
                f"target_modules={names!r}: {ALL_LINEAR!r} must be the only entry; with others it "
                "would be read as a module name. Remove this entry or all others."
            )
        if self.r == 0:
            self._refuse_what_has_no_effect()
        else:
            require_package("peft", extra="peft", needed_by=f"r={self.r}")

    def peft_config(self) -> "peft.LoraConfig | None":
        """Return `peft_config` for PPOTrainer; None to train all parameters."""
        if self.r == 0:
            return None
        # Imported here, because reading the settings must not import torch.
        from ppo_core.models.adapters import lora_config

        return lora_config(
            task_type="CAUSAL_LM",
            r=self.r,
            lora_alpha=self.alpha,
            target_modules=self.target_modules,
        )

    def _refuse_what_has_no_effect(self) -> None:
        defaults = {"alpha": 32, "target_modules": [ALL_LINEAR], "dtype": "float32"}
        for name, default in defaults.items():
            if (value := getattr(self, name)) != default:
                raise ConfigError(
                    f"{name}={value!r} would be ignored, because r = 0 trains without adapters. "
                    "Set r to the rank of the adapters, or remove the setting."
                )
