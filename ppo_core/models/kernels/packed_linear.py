"""Linear layers with weights prepared for decoding: packed by oneDNN, or cast once on a GPU.

A matmul of few rows takes about as long as reading the weight matrix from memory. oneDNN's packed
layout stores the matrix in the order in which the matmul reads it. On a GPU under autocast, the
weights are copied to autocast's precision. The copy has half as many bytes, and a captured decoding
step (`rollout.captured_steps`) does not need to cast the weights again.
"""

import copy
from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_core.models.kernels.hooks import is_hooked

MIN_NUMEL = 2**16
"""Smallest number of elements of a matrix that is packed."""

MAX_NUMEL = 2**28
"""Largest total number of elements to pack; their packed copies take 1 GiB in fp32."""

MIN_PASSES = 8
"""Smallest number of passes for which weights are packed; packing takes about one pass's time."""


def packed(module: nn.Module, rows: int, passes: int) -> nn.Module:
    """Return a copy of the module with packed weights, for `passes` passes of up to `rows` rows.

    The copy shares everything else with the module, records no gradient, and is valid until the
    weights change. The module itself is returned if nothing can be packed (as in fp32 on a GPU), if
    packing would take too long for so few passes, or if packing on a CPU would need too much
    memory.
    """
    if passes < MIN_PASSES or _packable_numel(module) > MAX_NUMEL:
        return module
    return _packed(module, rows)


def _packed(module: nn.Module, rows: int) -> nn.Module:
    if _can_be_packed(module):
        return _PackedLinear(cast(nn.Linear | Conv1D, module), rows)
    if _can_be_cast(module):
        return _CastLinear(cast(nn.Linear | Conv1D, module))
    children = {name: _packed(child, rows) for name, child in _children(module).items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    copied = copy.copy(module)
    copied._modules = {**module._modules, **children}
    return copied


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children by name; {} if the module's class is not from torch or transformers.

    A module from another library, such as an adapter layer, may change a child's weights.
    """
    is_known = type(module).__module__.startswith(("torch.nn.", "transformers."))
    return dict(module.named_children()) if is_known else {}


def _packable_numel(module: nn.Module) -> int:
    if _can_be_packed(module):
        return cast(nn.Linear, module).weight.numel()
    return sum(map(_packable_numel, _children(module).values()))


def _can_be_packed(module: nn.Module) -> bool:
    return (
        _onednn_supports_precision()
        and _is_plain(module, "cpu")
        and cast(nn.Linear, module).weight.numel() >= MIN_NUMEL
    )


def _can_be_cast(module: nn.Module) -> bool:
    return torch.is_autocast_enabled("cuda") and _is_plain(module, "cuda")


def _is_plain(module: nn.Module, device: str) -> bool:
    """Return whether the module is an unmodified linear layer with fp32 weights on this device."""
    return (
        type(module) in (nn.Linear, Conv1D)
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == device
        and module.weight.dtype == torch.float32
        and not is_hooked(module)
    )


def _onednn_supports_precision() -> bool:
    """Return whether oneDNN supports autocast's current precision, or fp32 without autocast."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if not torch.is_autocast_enabled("cpu"):
        return True
    is_bf16 = torch.get_autocast_dtype("cpu") == torch.bfloat16
    return is_bf16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _PackedLinear(nn.Module):
    """A packed linear layer, in the precision of autocast if it is created under autocast."""

    def __init__(self, module: nn.Linear | Conv1D, rows: int) -> None:
        super().__init__()
        matrix = _matrix_of(module).contiguous()
        is_autocast = torch.is_autocast_enabled("cpu")
        self._dtype = torch.get_autocast_dtype("cpu") if is_autocast else matrix.dtype
        self._matrix = torch.ops.mkldnn._reorder_linear_weight(matrix.to(self._dtype), rows)
        self._bias = None if module.bias is None else module.bias.detach().to(self._dtype)

    def forward(self, states: Tensor) -> Tensor:
        flat = states.to(self._dtype).flatten(0, -2)
        output = torch.ops.mkldnn._linear_pointwise(flat, self._matrix, self._bias, "none", [], "")
        return output.view(*states.shape[:-1], output.shape[-1])


class _CastLinear(nn.Module):
    """A linear layer on a GPU, cast to autocast's precision when it is created."""

    def __init__(self, module: nn.Linear | Conv1D) -> None:
        super().__init__()
        self._dtype = torch.get_autocast_dtype("cuda")
        self._matrix = _matrix_of(module).to(self._dtype)
        self._bias = None if module.bias is None else module.bias.detach().to(self._dtype)

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states.to(self._dtype), self._matrix, self._bias)


def _matrix_of(module: nn.Linear | Conv1D) -> Tensor:
    """Return the weights (outputs, inputs), without a gradient."""
    matrix = module.weight.detach()
    return matrix.T if isinstance(module, Conv1D) else matrix
