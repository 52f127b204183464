"""Gather sharded weights, and save a policy as one model in transformers' format."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_core.distributed.engine import Engine
from ppo_core.models.files.merge_adapter import merged_copy
from ppo_core.models.files.saved_precision import cast_weights, name_dtype

if TYPE_CHECKING:
    from peft import PeftModel


def gather_weights(
    engine: Engine, model: PreTrainedModel, adapted: "PeftModel | None"
) -> dict[str, Tensor] | None:
    """Return, in the main process, the weights for `save_plain`; all processes must call this.

    `adapted` is the PeftModel around the model, or None. The result is None in the other
    processes, and also for an unsharded PeftModel, which `save_plain` reads directly.
    """
    if adapted is None:
        return engine.full_state_dict(model)
    return engine.full_state_dict(adapted) if engine.shards_weights else None


def save_plain(
    model: PreTrainedModel,
    adapted: "PeftModel | None",
    folder: Path,
    weights: dict[str, Tensor] | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model with the weights of `gather_weights`; merge an adapter into a copy first.

    Without an adapter, the weights are written in `dtype`; None means the model's dtype.
    """
    if adapted is not None:
        merged_copy(adapted, weights=weights).save_pretrained(folder)
        return
    assert weights is not None
    model.save_pretrained(folder, state_dict=cast_weights(weights, dtype or model.dtype))
    name_dtype(folder, dtype or model.dtype)
