"""LoRA in supervised training: add adapters to a model that has none, and freeze the model."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_core.distributed.choose_sharding import SHARD_WEIGHTS
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.adapters import add_adapter, plain_model
from ppo_core.models.files.model_folder import adapter_refusal
from ppo_core.models.loading import is_classifier, load_classifier, load_policy

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


def require_plain(model: PreTrainedModel, path: str | Path) -> None:
    """Raise ModelError if a model was loaded with adapters.

    After training, saving such a model would lose its base or its adapter. If training added a
    second adapter, the saved model could not be loaded again (TRL #4713).
    """
    if getattr(model, "peft_config", None):
        raise adapter_refusal(path)


def add_task_adapter(
    model: PreTrainedModel, peft_config: "PeftConfig", task_type: str
) -> "PeftModel":
    """Add adapters for a task; only the adapters, and for SEQ_CLS the score head, are trained.

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


def keep_frozen_in_bf16(adapted: "PeftModel", engine: Engine) -> None:
    """Keep frozen matrices in bfloat16 if each pass rounds them to bfloat16 anyway.

    Losses and gradients stay the same, bit for bit, and the matrices need half the memory.
    `exact_weights` returns the unrounded matrices. The matrices stay in fp32 in three cases: passes
    compute in fp32; weights are sharded (all shards must have the precision of the adapters, fp32);
    or the adapter is not plain LoRA, because other adapters may read or copy the matrices.
    """
    config: Any = adapted.peft_config[adapted.active_adapter]
    is_lora = config.peft_type == "LORA" and not (config.use_dora or config.layer_replication)
    if engine.computes_in_bf16 and engine.sharding not in SHARD_WEIGHTS and is_lora:
        for _, weight in _frozen_matrices(adapted):
            weight.data = weight.data.bfloat16()
        for parameter in adapted.parameters():
            if parameter.dtype != torch.bfloat16:
                # Copy it out of the memory-mapped weights file, which stays in memory as long as
                # one tensor uses it.
                parameter.data = parameter.data.clone()


def exact_weights(adapted: "PeftModel", start: str | Path) -> dict[str, Tensor] | None:
    """Return all weights on the CPU, with the matrices of `keep_frozen_in_bf16` unrounded.

    Return None if no matrix was rounded. `start` is the folder or hub id of the model before its
    training; the unrounded matrices are read from there.

    Raises:
        ModelError: the files of `start` were changed since the model was loaded.
    """
    rounded = [name for name, weight in _frozen_matrices(adapted) if weight.dtype == torch.bfloat16]
    if not rounded:
        return None
    load = load_classifier if is_classifier(start) else load_policy
    exact = load(start).base_model.state_dict()
    weights = {name: weight.cpu() for name, weight in adapted.state_dict().items()}
    prefix = f"base_model.model.{plain_model(adapted).base_model_prefix}."
    for name in rounded:
        own, before = prefix + name, exact[name.replace(".base_layer.", ".")]
        if not before.bfloat16().equal(weights[own]):
            raise ModelError(
                f"The files of '{start}' were changed during the training: {name} differs, so the "
                "adapter cannot be merged. Restore the files, and resume from the last checkpoint."
            )
        weights[own] = before
    return weights


def _frozen_matrices(adapted: "PeftModel") -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the frozen weights of the backbone's linear layers, by their names in the backbone."""
    for name, module in plain_model(adapted).base_model.named_modules():
        # Layers of `modules_to_save` are trained as copies; their originals have no use.
        if name.endswith(".original_module"):
            continue
        # A subclass of nn.Linear may compute with its weight in another way.
        if type(module) in (nn.Linear, Conv1D) and not module.weight.requires_grad:
            yield f"{name}.weight", module.weight
