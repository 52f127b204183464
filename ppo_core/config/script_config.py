"""The settings of PPO for scripts, which `ppo_core.PPOConfig` names."""

from dataclasses import dataclass

from ppo_core.config.ppo_config import PPOConfig
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
