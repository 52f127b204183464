"""Choose the precision of training if the settings do not specify it."""

import torch
from torch import nn

from ppo_core.data.text_config import text_config

SMALLEST_WIDTH = 192
"""Smallest hidden size at which bfloat16 is faster than fp32 on a CPU."""


def trains_in_bf16(asked: bool | None, model: nn.Module, *, use_cpu: bool) -> bool:
    """Return `asked`; if it is None, return whether bfloat16 autocast is fast on this hardware.

    Without `asked`, return False for a policy whose weights are not all fp32.
    """
    if asked is not None:
        return asked
    if {parameter.dtype for parameter in model.parameters()} != {torch.float32}:
        return False
    return is_fast_in_bf16(_width(model), use_cpu=use_cpu)


def is_fast_in_bf16(width: int, *, use_cpu: bool) -> bool:
    """Return whether bfloat16 autocast is fast on this machine for models of a hidden size."""
    if torch.cuda.is_available() and not use_cpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    can = torch.cpu.get_capabilities()
    has_units = can.get("avx512_bf16", False) or can.get("amx_bf16", False)
    return has_units and width >= SMALLEST_WIDTH


def _width(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    # A model type without a width is refused later, with its own message.
    return getattr(text_config(config), "hidden_size", 0) if config is not None else 0
