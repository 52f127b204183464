"""A device beside the CPU, without a GPU: `other`, which computes on the CPU and checks devices.

A model that was left on the CPU, or an input of it, ends in an error as on a GPU: an operation
takes tensors of one device. The device is registered for the whole process, so use it in a program
of its own. It has no gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "other"

COPIES = ("aten::_copy_from", "aten::copy_", "aten::_to_copy")
"""Operations between devices."""

_libraries: list[torch.library.Library] = []


class OtherTensor(Tensor):
    """A tensor on the device: a tensor on the CPU, wrapped."""

    on_cpu: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> "OtherTensor":
        made: OtherTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            on_cpu.shape,
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=NAME,
        )
        made.on_cpu = on_cpu
        return made

    def tolist(self) -> Any:
        """Copy the numbers, as from any device."""
        return self.on_cpu.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Copy the numbers if that is asked for; otherwise raise, as on any device."""
        if not force:
            raise TypeError("A tensor on another device has no array. Call cpu() first.")
        return self.on_cpu.numpy()

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute an operation that takes a tensor on the device."""
        return _compute(op, *args, **(kwargs or {}))


def register() -> torch.device:
    """Add the device to this process, and return it."""
    _setup_privateuseone_for_python_backend(NAME, _Backend())
    any_operation = torch.library.Library("_", "IMPL")
    any_operation.fallback(_compute, "PrivateUse1")
    # torch would compute these by resizing an empty result, and a wrapper keeps its shape.
    aten = torch.library.Library("aten", "IMPL")
    for overload in ("default", "start", "start_step"):
        op = getattr(torch.ops.aten.arange, overload)
        aten.impl(op.name(), _computed_by(op), "PrivateUse1")
    _libraries.extend([any_operation, aten])  # what they registered ends with them
    # torch.tensor cannot make a wrapper.
    make = torch.tensor

    def make_and_move(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        return make(data, **options) if device is None else make(data, **options).to(device)

    torch.tensor = make_and_move  # type: ignore[assignment]
    return torch.device(NAME)


class _Backend:
    """What torch asks the module `torch.other`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]


def _computed_by(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _compute(op, *args, **kwargs)


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an operation on the CPU, and return the result on the device where it belongs."""
    name = op.name()
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [tensor for tensor in tensors if isinstance(tensor, OtherTensor)]
    left = [tensor for tensor in tensors if not isinstance(tensor, OtherTensor) and tensor.dim()]
    if here and left and not name.startswith(COPIES):
        raise RuntimeError(f"{name} has tensors on {NAME} and on {left[0].device}.")
    if name.startswith("aten::_copy_from"):
        _on_cpu(args[1]).copy_(_on_cpu(args[0]))
        return args[1]
    result = op(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
    goes_to = kwargs.get("device")
    if name.startswith("aten::_to_copy") and torch.device(goes_to or NAME).type != NAME:
        return result
    if name.startswith("aten::copy_") and not isinstance(args[0], OtherTensor):
        return args[0]
    # An operation in place returns the tensor that it was given.
    known = {id(tensor.on_cpu): tensor for tensor in here}
    return tree_map(lambda made: known[id(made)] if id(made) in known else _wrapped(made), result)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.on_cpu if isinstance(value, OtherTensor) else value


def _wrapped(value: Any) -> Any:
    plain = isinstance(value, Tensor) and not isinstance(value, OtherTensor)
    return OtherTensor(value) if plain else value
