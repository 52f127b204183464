"""PPO for language models, independent of any flow, registry or object store.

Public names are imported on first use, so that `import ppo_core` works without torch: the
machines that launch a flow may not have torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # The public names, for mypy and editors.
    from ppo_core.config.script_arguments import DatasetArguments as _ScriptArguments
    from ppo_core.data.chat_template import SIMPLE_CHAT_TEMPLATE as SIMPLE_CHAT_TEMPLATE
    from ppo_core.errors import ConfigError as ConfigError
    from ppo_core.errors import DataError as DataError
    from ppo_core.errors import ModelError as ModelError
    from ppo_core.errors import PPOError as PPOError
    from ppo_core.errors import TrainingError as TrainingError
    from ppo_core.models.adapters import add_critic_adapter as add_critic_adapter
    from ppo_core.models.adapters import get_peft_config as get_peft_config
    from ppo_core.models.critic import Critic as Critic
    from ppo_core.models.loading import load_policy as load_policy
    from ppo_core.models.loading import load_reward_model as load_reward_model
    from ppo_core.models.loading import load_tokenizer as load_tokenizer
    from ppo_core.models.model_with_value_head import (
        AutoModelForCausalLMWithValueHead as AutoModelForCausalLMWithValueHead,
    )
    from ppo_core.models.model_with_value_head import (
        AutoModelForSeq2SeqLMWithValueHead as AutoModelForSeq2SeqLMWithValueHead,
    )
    from ppo_core.models.quantization import get_kbit_device_map as get_kbit_device_map
    from ppo_core.models.quantization import get_quantization_config as get_quantization_config
    from ppo_core.models.reference import create_reference_model as create_reference_model
    from ppo_core.models.reward_adapter import load_reward_adapter as load_reward_adapter
    from ppo_core.models.reward_model import RewardModel as RewardModel
    from ppo_core.reporting.sample_table import Completions as Completions
    from ppo_core.supervised.supervised_config import SupervisedConfig as SupervisedConfig
    from ppo_core.supervised.training import train_reward_model as train_reward_model
    from ppo_core.supervised.training import train_sft as train_sft
    from ppo_core.training.answer_prompts import Answers as Answers
    from ppo_core.training.answer_prompts import answer_prompts as answer_prompts
    from ppo_core.trl.ppo_trainer import PPOTrainer as PPOTrainer
    from ppo_core.trl.script_config import ScriptModelConfig as _ModelConfig
    from ppo_core.trl.script_config import ScriptPPOConfig as _PPOConfig
    from ppo_core.trl.script_parser import TrlParser as TrlParser

    PPOConfig = _PPOConfig
    ModelConfig = _ModelConfig
    ScriptArguments = _ScriptArguments

# Public name -> its module in this package, with `:NAME` if the object has another name there.
_HOMES = {
    "PPOConfig": "trl.script_config:ScriptPPOConfig",
    "PPOTrainer": "trl.ppo_trainer",
    "ScriptArguments": "config.script_arguments:DatasetArguments",
    "ModelConfig": "trl.script_config:ScriptModelConfig",
    "TrlParser": "trl.script_parser",
    "SIMPLE_CHAT_TEMPLATE": "data.chat_template",
    "get_peft_config": "models.adapters",
    "get_quantization_config": "models.quantization",
    "get_kbit_device_map": "models.quantization",
    "load_policy": "models.loading",
    "load_reward_model": "models.loading",
    "load_tokenizer": "models.loading",
    "Critic": "models.critic",
    "RewardModel": "models.reward_model",
    "AutoModelForCausalLMWithValueHead": "models.model_with_value_head",
    "AutoModelForSeq2SeqLMWithValueHead": "models.model_with_value_head",
    "create_reference_model": "models.reference",
    "add_critic_adapter": "models.adapters",
    "load_reward_adapter": "models.reward_adapter",
    "Answers": "training.answer_prompts",
    "answer_prompts": "training.answer_prompts",
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


if not TYPE_CHECKING:  # With `__getattr__`, mypy would accept any attribute of the package.

    def __getattr__(name: str) -> Any:
        """Import a public name from its module on first use."""
        if name not in _HOMES:
            raise AttributeError(f"module 'ppo_core' has no attribute {name!r}")
        home, _, own_name = _HOMES[name].partition(":")
        return getattr(import_module(f"ppo_core.{home}"), own_name or name)


def __dir__() -> list[str]:
    """Return the names of the package, including public names that are not imported yet."""
    return sorted({*globals(), *_HOMES})
