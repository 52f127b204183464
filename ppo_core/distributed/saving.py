"""A policy on disk as one plain model, wherever its weights are: sharded, or under an adapter."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

from ppo_core.distributed.engine import Engine
from ppo_core.models.adapter_weights import merged_copy

if TYPE_CHECKING:
    from peft import PeftModel


def gather_weights(
    engine: Engine, model: PreTrainedModel, adapted: "PeftModel | None"
) -> dict[str, Tensor] | None:
    """Return the weights that `save_plain` needs, in the main process; all processes must call.

    `adapted` is the PeftModel that contains the model, if there is one. None where `save_plain`
    can read the weights of the PeftModel itself, and in the other processes.
    """
    if adapted is None:
        return engine.full_state_dict(model)
    return engine.full_state_dict(adapted) if engine.shards_weights else None


def save_plain(
    model: PreTrainedModel,
    adapted: "PeftModel | None",
    folder: Path,
    weights: dict[str, Tensor] | None,
) -> None:
    """Write a model with the weights of `gather_weights`; an adapter is merged into a copy of it.

    Raises:
        ModelError: the adapter's base is quantized.
    """
    if adapted is None:
        model.save_pretrained(folder, state_dict=weights)
    else:
        merged_copy(adapted, weights=weights).save_pretrained(folder)
