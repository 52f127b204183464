"""Settings for scripts that load data and models by themselves, as TRL's scripts do."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.script_arguments import LoraArguments, ModelArguments
from ppo_core.trl.script_settings import refusing_unsupported

TRL_MODEL = "EleutherAI/pythia-160m"
"""Default policy and default reward model of scripts for TRL."""


@refusing_unsupported
@dataclass(frozen=True, kw_only=True)
class ScriptPPOConfig(PPOConfig):
    """`PPOConfig` with TRL's default models, which TRL's documented commands rely on.

    Only scripts use these defaults: `python -m ppo_core` and the flow have no default models.

    Raises:
        ConfigError: a value is out of range, two values contradict each other, or a given setting
            of TRL or `transformers.TrainingArguments` is not supported.
    """

    sft_model_path: str | None = TRL_MODEL
    """Folder or hub id of the initial policy; read by scripts."""

    reward_model_path: str | None = TRL_MODEL
    """Folder or hub id of the reward model; read by scripts."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings without the hub token, as a script logs them."""
        return {name: value for name, value in asdict(self).items() if name != "hub_token"}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return `to_dict` for trackers: lists and other compound values become texts."""
        plain = (bool, int, float, str)
        return {k: v if isinstance(v, plain) else str(v) for k, v in self.to_dict().items()}

    def to_json_string(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)


@dataclass(frozen=True, kw_only=True)
class ScriptModelConfig(ModelArguments):
    """`ModelArguments` of scripts; a script may load models in any precision.

    The trainer trains in float32, and saves the policy in the precision of the loaded model.
    """

    trust_remote_code: bool = False
    """Run code from a model's repository; only the script reads this setting."""

    def __post_init__(self) -> None:
        """Check the settings of adapters; the trainer checks the loaded models."""
        LoraArguments.__post_init__(self)

    @property
    def torch_dtype(self) -> str:
        """Older name of `dtype`."""
        return self.dtype
