"""Matrices laid out for products with few rows, as decoding has them.

A product with 32 rows takes about as long as its matrix takes to be read. Laid out by oneDNN in the
order in which it is read, a head of 256 x 50,304 took 5.8 ms on two cores of a Zen 4, as it lies in
memory 8.7 by oneDNN and 14.8 by MKL; a layer's 512 x 1,376 took 0.29 and not 0.50. Products with
the 2,048 rows of prompts gain a quarter.
"""

import copy
from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SMALLEST = 2**16
"""Numbers of a matrix from which on it is laid out anew; with fewer nothing is gained."""

MOST_NUMBERS = 2**28
"""Numbers of the matrices of a module, 1 GiB, up to which there is memory for them twice."""

FEWEST_PASSES = 8
"""Passes from which on it pays: to lay out 42 million weights took 70 ms, as long as a pass."""


def packed(module: nn.Module, rows: int, passes: int) -> nn.Module:
    """The module, its large matrices laid out for so many passes of up to so many rows.

    What comes back shares all else with the module, records no gradient, and is of use for as long
    as the weights stay as they are. Where nothing is gained, on other devices than a CPU
    among others, it is the module itself.
    """
    if passes < FEWEST_PASSES or _numbers(module) > MOST_NUMBERS:
        return module
    return _packed(module, rows)


def _packed(module: nn.Module, rows: int) -> nn.Module:
    if _can_be_packed(module):
        return _Packed(cast(nn.Linear | Conv1D, module), rows)
    children = {name: _packed(child, rows) for name, child in _children(module).items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    copied = copy.copy(module)
    copied._modules = {**module._modules, **children}
    return copied


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """Those whose weights are what they multiply by.

    An adapter may change the weights of the layer that it is around, so there are none inside it.
    """
    is_known = type(module).__module__.startswith(("torch.nn.", "transformers."))
    return dict(module.named_children()) if is_known else {}


def _numbers(module: nn.Module) -> int:
    if _can_be_packed(module):
        return cast(nn.Linear, module).weight.numel()
    return sum(map(_numbers, _children(module).values()))


def _can_be_packed(module: nn.Module) -> bool:
    return (
        _has_library()
        and type(module) in (nn.Linear, Conv1D)
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and module.weight.numel() >= SMALLEST
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    )


def _has_library() -> bool:
    """Whether oneDNN multiplies here in the precision of the moment."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if not torch.is_autocast_enabled("cpu"):
        return True
    is_bf16 = torch.get_autocast_dtype("cpu") == torch.bfloat16
    return is_bf16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Packed(nn.Module):
    """A linear map, in the precision that it has where this is made."""

    def __init__(self, module: nn.Linear | Conv1D, rows: int) -> None:
        super().__init__()
        matrix = module.weight.detach()
        if isinstance(module, Conv1D):
            matrix = matrix.T.contiguous()
        in_half = torch.is_autocast_enabled("cpu")
        self._dtype = torch.get_autocast_dtype("cpu") if in_half else matrix.dtype
        self._matrix = torch.ops.mkldnn._reorder_linear_weight(matrix.to(self._dtype), rows)
        self._bias = None if module.bias is None else module.bias.detach().to(self._dtype)

    def forward(self, states: Tensor) -> Tensor:
        """States (..., D) times the matrix."""
        flat = states.to(self._dtype).flatten(0, -2)
        made = torch.ops.mkldnn._linear_pointwise(flat, self._matrix, self._bias, "none", [], "")
        return made.view(*states.shape[:-1], made.shape[-1])
