"""What an optimizer keeps for one parameter, as whole tensors and back, to the bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ppo_core.distributed.fsdp_engine import sharded_like, whole
from ppo_core.errors import TrainingError

_NUMBERS = {int: torch.int64, float: torch.float64}


def read_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """An optimizer's state of a parameter, such as exp_avg, exp_avg_sq and step.

    Empty before its first step. A plain number is a tensor of int64 or float64 without
    dimensions; what is None is left out. What is whole already is not copied.

    Raises:
        TrainingError: something in it is neither a tensor nor a number.
    """
    state = optimizer.state.get(parameter, {})
    return {
        name: whole(as_tensor(optimizer, name, value))
        for name, value in state.items()
        if value is not None
    }


def as_tensor(optimizer: Optimizer, name: str, value: Any) -> Tensor:
    """What an optimizer keeps by a name, as a tensor.

    Raises:
        TrainingError: it is neither a tensor nor a number.
    """
    if isinstance(value, Tensor):
        return value
    if type(value) not in _NUMBERS:
        raise TrainingError(
            f"{type(optimizer).__name__} keeps {name}={value!r:.80} for a parameter, which is "
            "neither a tensor nor a number: a checkpoint could not hold it. Use an optimizer that "
            "keeps tensors, or save_strategy='no'."
        )
    return torch.tensor(value, dtype=_NUMBERS[type(value)])


def write_state(
    optimizer: Optimizer, parameter: nn.Parameter, tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `read_state` gave; the tensors are copied, their precision stays."""
    optimizer.state.pop(parameter, None)
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    for name, tensor in tensors.items():
        if tensor.ndim == 0:
            kept = as_value(tensor, group, parameter.device)
        elif tensor.shape == parameter.shape:
            kept = sharded_like(tensor, parameter).to(parameter.device, copy=True)
        else:
            kept = tensor.to(parameter.device, copy=True)
        optimizer.state[parameter][name] = kept


def as_value(tensor: Tensor, group: Mapping[str, Any], device: torch.device) -> Any:
    """The number, or a copy of the tensor, that an optimizer keeps without dimensions.

    `group` are the options of the parameter's group, and `device` is where it is.
    """
    if tensor.dtype in _NUMBERS.values():
        return tensor.item()
    # Torch counts steps on the CPU, unless its kernels read the count on the device.
    on_device = group.get("fused") or group.get("capturable")
    return tensor.to(device if on_device else "cpu", copy=True)


def check_shape(name: str, expected: torch.Size, found: torch.Size) -> None:
    """Refuse a tensor that would be broadcast.

    Raises:
        TrainingError: the shapes differ.
    """
    if expected != found:
        raise TrainingError(
            f"{name!r} has the shape {tuple(found)} in the checkpoint and {tuple(expected)} here. "
            "Resume with the models that wrote the checkpoint."
        )
