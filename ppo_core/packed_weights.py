"""Matrices laid out for products with few rows, as decoding has them.

A product with 32 rows takes about as long as its matrix takes to be read. Laid out by oneDNN in the
order in which it is read, a head of 256 x 50,304 took 5.8 ms on two cores of a Zen 4, as it lies in
memory 8.7 by oneDNN and 14.8 by MKL; a layer's 512 x 1,376 took 0.29 and not 0.50. Products with
the 2,048 rows of prompts gain a quarter.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from ppo_core.fp32_products import ROWS

LEAST_NUMBERS = 2**16
"""Numbers of a matrix from which on it is laid out anew; with fewer nothing is gained."""


def packed(module: nn.Module, rows: int) -> nn.Module:
    """The module, its large matrices laid out for products with up to so many rows.

    What comes back shares all else with the module, and is of use for as long as weights and
    adapters stay as they are. On other devices than a CPU it is the module itself.
    """
    if not torch.backends.mkldnn.is_available():
        return module
    if _can_be_packed(module):
        return _Packed(module, rows)
    children = {name: child and packed(child, rows) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    copied = copy.copy(module)
    copied._modules = children
    return copied


def _can_be_packed(module: nn.Module) -> bool:
    return (
        type(module) in (nn.Linear, Conv1D)
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and module.weight.numel() >= LEAST_NUMBERS
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    )


class _Packed(nn.Module):
    """A linear map, in the precision that it has where this is made."""

    def __init__(self, module: nn.Module, rows: int) -> None:
        super().__init__()
        # Adapters around it ask for these.
        self.weight, self.bias = module.weight, module.bias
        matrix = module.weight.detach()
        if isinstance(module, Conv1D):
            matrix = matrix.T.contiguous()
        in_half = torch.is_autocast_enabled("cpu")
        self._dtype = torch.get_autocast_dtype("cpu") if in_half else matrix.dtype
        self._matrix = torch.ops.mkldnn._reorder_linear_weight(
            matrix.to(self._dtype), _filled_up(rows)
        )
        self._added = None if self.bias is None else self.bias.detach().to(self._dtype)

    def forward(self, states: Tensor) -> Tensor:
        """States (..., D) times the matrix."""
        flat = states.to(self._dtype).flatten(0, -2)
        filled = pad(flat, (0, 0, 0, _filled_up(len(flat)) - len(flat)))
        made = torch.ops.mkldnn._linear_pointwise(filled, self._matrix, self._added, "none", [], "")
        return made[: len(flat)].view(*states.shape[:-1], -1)


def _filled_up(rows: int) -> int:
    """The next of four sizes an octave: oneDNN prepares itself for each, and keeps a MiB of that."""
    step = max(ROWS, 2 ** (rows - 1).bit_length() // 8)
    return rows + -rows % step
