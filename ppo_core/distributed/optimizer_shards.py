"""The optimizer state of one parameter as unsharded tensors, restored bit for bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ppo_core.distributed.fsdp_engine import sharded_like, unsharded
from ppo_core.errors import TrainingError

_NUMBERS = {int: torch.int64, float: torch.float64}


def read_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the optimizer state of a parameter: exp_avg, exp_avg_sq, step, ...

    It is empty before the first step. A plain number becomes a 0-dimensional tensor of int64 or
    float64; entries that are None are left out. Tensors that are not sharded are not copied.

    Raises:
        TrainingError: an entry is neither a tensor nor a number.
    """
    state = optimizer.state.get(parameter, {})
    return {
        name: unsharded(as_tensor(optimizer, name, value))
        for name, value in state.items()
        if value is not None
    }


def as_tensor(optimizer: Optimizer, name: str, value: Any) -> Tensor:
    """Return an entry of an optimizer state as a tensor.

    Raises:
        TrainingError: the entry is neither a tensor nor a number.
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
    """Restore the state that `read_state` returned; tensors are copied and keep their dtype."""
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
    """Return a 0-dimensional entry as the optimizer keeps it: a number or a copy of the tensor.

    `group` holds the options of the parameter's group, and `device` is the parameter's device.
    """
    if tensor.dtype in _NUMBERS.values():
        return tensor.item()
    # Torch counts steps on the CPU, except for kernels that read the count on the device.
    on_device = group.get("fused") or group.get("capturable")
    return tensor.to(device if on_device else "cpu", copy=True)


def check_shape(name: str, expected: torch.Size, found: torch.Size) -> None:
    """Raise if two shapes differ, where a copy could broadcast.

    Raises:
        TrainingError: the shapes differ.
    """
    if expected != found:
        raise TrainingError(
            f"{name!r} has the shape {tuple(found)} in the checkpoint and {tuple(expected)} here. "
            "Resume with the models that wrote the checkpoint."
        )
