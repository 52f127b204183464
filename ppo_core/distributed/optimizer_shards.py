"""Read the optimizer state of one parameter as unsharded tensors, and restore it bit for bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ppo_core.errors import TrainingError

_NUMBERS = {int: torch.int64, float: torch.float64}


def read_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the optimizer state of a parameter: exp_avg, exp_avg_sq, step, ...

    The state is empty before the first step. A plain number becomes a 0-dimensional tensor of
    int64 or float64. Entries that are None are left out. An entry that was not sharded is returned
    without a copy.

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
            f"{type(optimizer).__name__} keeps {name}={value!r:.80} in a parameter's state. A "
            "checkpoint can hold only tensors and numbers. Use an optimizer that keeps only "
            "these, or set save_strategy='no'."
        )
    return torch.tensor(value, dtype=_NUMBERS[type(value)])


def write_state(
    optimizer: Optimizer, parameter: nn.Parameter, tensors: Mapping[str, Tensor]
) -> None:
    """Restore the state that `read_state` returned; copy the tensors without changing the dtype."""
    optimizer.state.pop(parameter, None)
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    for name, tensor in tensors.items():
        # A parameter without dimensions has moments without dimensions.
        if tensor.ndim == 0 and (parameter.ndim or name == "step"):
            kept = as_value(tensor, group, parameter.device)
        elif tensor.shape == parameter.shape:
            kept = sharded_like(tensor, parameter).to(parameter.device, copy=True)
        else:
            kept = tensor.to(parameter.device, copy=True)
        optimizer.state[parameter][name] = kept


def as_value(tensor: Tensor, group: Mapping[str, Any], device: torch.device) -> Any:
    """Convert a 0-dimensional entry to the type that the optimizer keeps: number or copied tensor.

    `group` contains the options of the parameter's group, and `device` is the parameter's device.
    """
    if tensor.dtype in _NUMBERS.values():
        return tensor.item()
    # Torch keeps the step count on the CPU, but fused and capturable kernels read it on the device.
    on_device = group.get("fused") or group.get("capturable")
    return tensor.to(device if on_device else "cpu", copy=True)


def check_shape(name: str, expected: torch.Size, found: torch.Size) -> None:
    """Raise if two shapes differ, because a copy could broadcast silently.

    Raises:
        TrainingError: the shapes differ.
    """
    if expected != found:
        raise TrainingError(
            f"{name!r} has the shape {tuple(found)} in the checkpoint, but {tuple(expected)} in "
            "this run. Resume with the models that wrote the checkpoint."
        )


def unsharded(tensor: Tensor) -> Tensor:
    """Return the full tensor in every process; an unsharded tensor is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor as `like` is sharded; return `tensor` unchanged if `like` is full."""
    if not isinstance(like, DTensor):
        return tensor
    on_device = tensor.to(like.device)
    # Every process has the full tensor, so no source rank needs to send it.
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)
