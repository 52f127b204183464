"""LoRA in supervised training: adapters are trained, kept, and merged into a plain model."""

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
"""Where in the output folder the adapter alone is kept, as PEFT reads it."""


def refuse_adapter_folder(path: str | Path) -> None:
    """Refuse a folder that holds an adapter, before anything is loaded from it.

    Raises:
        ModelError: it does.
    """
    if (Path(path) / "adapter_config.json").exists():
        raise _not_plain(path)


def require_plain(model: PreTrainedModel, path: str | Path) -> None:
    """Refuse a model that was loaded with adapters on it.

    Training it would leave its base or its adapter behind when it is saved, and another
    adapter on top could not be loaded again (TRL #4713).

    Raises:
        ModelError: it was.
    """
    if getattr(model, "peft_config", None):
        raise _not_plain(path)


def _not_plain(path: str | Path) -> ModelError:
    return ModelError(
        f"'{path}' is a PEFT model, an adapter with its base. Merge it first: "
        "peft.AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload()"
        ".save_pretrained(FOLDER), and start from that folder."
    )


def adapted(model: PreTrainedModel, peft_config: "PeftConfig", task_type: str) -> "PeftModel":
    """The model with new adapters on it, which alone are trained; with SEQ_CLS, the head too.

    The layers of `model` are replaced in place; `peft_config` is left as it is.

    Raises:
        ConfigError: the peft_config is for another task.
        ModelError: peft is not installed, or the peft_config does not fit.
    """
    given = getattr(peft_config, "task_type", None)
    if given not in (None, task_type):
        raise ConfigError(
            f"task_type={str(given)!r} of the peft_config must be '{task_type}' here: else the "
            "wrong layers would be trained and saved. Leave it out."
        )
    config = copy.deepcopy(peft_config)
    config.task_type = task_type
    return add_adapter(model, config)


def keep_and_merge(model: "PeftModel", output_dir: str | Path) -> PreTrainedModel:
    """Save the adapter in a folder of its own; returns the plain model that it makes."""
    save_adapter(model, Path(output_dir) / ADAPTER_FOLDER)
    merged: PreTrainedModel = model.merge_and_unload()
    return merged
