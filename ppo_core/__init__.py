"""PPO for language models: the algorithm, apart from any flow, registry or store.

The names below are loaded when they are first used, so that importing `ppo_core` costs
nothing: launch machines parse the flow without torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "PPOConfig": "config",
    "ConfigError": "errors",
    "DataError": "errors",
    "ModelError": "errors",
    "PPOError": "errors",
    "TrainingError": "errors",
    "Critic": "models",
    "RewardModel": "models",
    "load_policy": "models",
    "load_reward_model": "models",
    "load_tokenizer": "models",
    "Answers": "evaluation",
    "answer_prompts": "evaluation",
    "SupervisedConfig": "config",
    "train_reward_model": "supervised",
    "train_sft": "supervised",
    "PPOTrainer": "trainer",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a public name from its file, the first time that it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ppo_core' has no attribute {name!r}")
    return getattr(import_module(f"ppo_core.{_HOMES[name]}"), name)
