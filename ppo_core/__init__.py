"""PPO for language models, independent of any flow, registry or object store.

Public names are imported on first use, so that `import ppo_core` works without torch: the
machines that launch a flow may not have torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Name -> module of the package, and the name there if it is another.
_HOMES = {
    "PPOConfig": "config.script_config:ScriptPPOConfig",
    "PPOTrainer": "training.trainer",
    "ScriptArguments": "config.script_arguments:DatasetArguments",
    "ModelConfig": "config.script_config:ScriptModelConfig",
    "SIMPLE_CHAT_TEMPLATE": "data.chat_template",
    "get_peft_config": "models.adapters",
    "get_quantization_config": "models.quantization",
    "get_kbit_device_map": "models.quantization",
    "load_policy": "models.loading",
    "load_reward_model": "models.loading",
    "load_tokenizer": "models.loading",
    "Critic": "models.actor_critic",
    "RewardModel": "models.reward_model",
    "AutoModelForCausalLMWithValueHead": "models.value_head",
    "AutoModelForSeq2SeqLMWithValueHead": "models.value_head",
    "create_reference_model": "models.reference",
    "add_critic_adapter": "models.adapters",
    "load_reward_adapter": "models.reward_adapter",
    "Answers": "training.evaluation",
    "answer_prompts": "training.evaluation",
    "Completions": "reporting.sample_table",
    "SupervisedConfig": "supervised.supervised_config",
    "train_reward_model": "supervised.training",
    "train_sft": "supervised.training",
    "PPOError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "ModelError": "errors",
    "TrainingError": "errors",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ppo_core' has no attribute {name!r}")
    home, _, own_name = _HOMES[name].partition(":")
    return getattr(import_module(f"ppo_core.{home}"), own_name or name)


def __dir__() -> list[str]:
    """Return the names of the package, with those that are not imported yet."""
    return sorted({*globals(), *_HOMES})
