"""LoRA in supervised training: add adapters, save them alone, merge them into a plain model."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.adapter_weights import save_adapter
from ppo_core.models.adapters import add_adapter

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

ADAPTER_FOLDER = "adapter"
"""Folder inside the output folder with the adapter alone, in PEFT's format."""


def refuse_adapter_folder(path: str | Path) -> None:
    """Raise ModelError if a folder holds an adapter; nothing is loaded from it."""
    if (Path(path) / "adapter_config.json").exists():
        raise _not_plain(path)


def require_plain(model: PreTrainedModel, path: str | Path) -> None:
    """Raise ModelError if a model was loaded with adapters.

    Training it would lose its base or its adapter when it is saved, and another
    adapter on top could not be loaded again (TRL #4713).
    """
    if getattr(model, "peft_config", None):
        raise _not_plain(path)


def _not_plain(path: str | Path) -> ModelError:
    return ModelError(
        f"'{path}' is a PEFT model, an adapter with its base. Merge it first: "
        "peft.AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload()"
        ".save_pretrained(FOLDER), and start from that folder."
    )


def add_task_adapter(
    model: PreTrainedModel, peft_config: "PeftConfig", task_type: str
) -> "PeftModel":
    """Add adapters for a task: only they are trained, with SEQ_CLS also the head.

    The layers of `model` are replaced in place; `peft_config` is not changed.

    Raises:
        ConfigError: the peft_config is for another task.
        ModelError: peft is not installed, or the peft_config does not fit.
    """
    given = getattr(peft_config, "task_type", None)
    if given not in (None, task_type):
        raise ConfigError(
            f"task_type={str(given)!r} of the peft_config must be '{task_type}' here: otherwise "
            "the wrong layers would be trained and saved. Leave it out."
        )
    config = copy.deepcopy(peft_config)
    config.task_type = task_type
    return add_adapter(model, config)


def save_and_merge(model: "PeftModel", output_dir: str | Path) -> PreTrainedModel:
    """Save the adapter in `ADAPTER_FOLDER`, and return the plain model with it merged."""
    save_adapter(model, Path(output_dir) / ADAPTER_FOLDER)
    merged: PreTrainedModel = model.merge_and_unload()
    return merged
