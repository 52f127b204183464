"""LoRA in supervised training: adapters for a task, on a model without adapters."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from ppo_core.errors import ConfigError
from ppo_core.models.adapters import add_adapter
from ppo_core.models.files.model_folder import adapter_refusal

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


def require_plain(model: PreTrainedModel, path: str | Path) -> None:
    """Raise ModelError if a model was loaded with adapters.

    After training, saving such a model would lose its base or its adapter. A model with an
    additional adapter could not be loaded again (TRL #4713).
    """
    if getattr(model, "peft_config", None):
        raise adapter_refusal(path)


def add_task_adapter(
    model: PreTrainedModel, peft_config: "PeftConfig", task_type: str
) -> "PeftModel":
    """Add adapters for a task; only the adapters are trained, and with SEQ_CLS the score head.

    The layers of `model` are replaced in place; `peft_config` is not changed.

    Raises:
        ConfigError: the peft_config is for another task.
        ModelError: peft is not installed, or the peft_config does not fit the model.
    """
    given = getattr(peft_config, "task_type", None)
    if given not in (None, task_type):
        raise ConfigError(
            f"task_type={str(given)!r} of the peft_config must be '{task_type}', or the wrong "
            "layers would be trained and saved. Remove task_type from the peft_config."
        )
    config = copy.deepcopy(peft_config)
    config.task_type = task_type
    return add_adapter(model, config)
