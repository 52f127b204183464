"""Settings for scripts that load data and models by themselves, as TRL's do."""

from dataclasses import dataclass

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.script_arguments import LoraArguments, ModelArguments
from ppo_core.config.unsupported_settings import refusing_unsupported

TRL_MODEL = "EleutherAI/pythia-160m"
"""Model that scripts for TRL load as the policy and the reward model if none is named."""


@refusing_unsupported
@dataclass(frozen=True, kw_only=True)
class ScriptPPOConfig(PPOConfig):
    """`PPOConfig` with TRL's default models, which TRL's documented commands rely on.

    Only scripts read them: `python -m ppo_core` and the flow have no default models.
    """

    sft_model_path: str | None = TRL_MODEL
    """Folder or hub id of the initial policy; read by scripts."""

    reward_model_path: str | None = TRL_MODEL
    """Folder or hub id of the reward model; read by scripts."""


@dataclass(frozen=True, kw_only=True)
class ScriptModelConfig(ModelArguments):
    """`ModelArguments` of a script, which may load models in any precision.

    The trainer trains in float32, and saves the policy in the precision in which it came.
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
