"""Choose the precision of training if the settings do not specify it."""

import torch
from torch import nn

from ppo_core.config.placement import is_fast_in_bf16
from ppo_core.data.text_config import text_config


def trains_in_bf16(asked: bool | None, model: nn.Module, *, use_cpu: bool) -> bool:
    """Return `asked` if it is not None.

    Otherwise return whether all weights are fp32 and bfloat16 autocast is fast on this hardware.
    """
    if asked is not None:
        return asked
    if {parameter.dtype for parameter in model.parameters()} != {torch.float32}:
        return False
    return is_fast_in_bf16(_width(model), use_cpu=use_cpu)


def _width(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    # A later check refuses a model type without a width, with a message of its own.
    return getattr(text_config(config), "hidden_size", 0) if config is not None else 0
