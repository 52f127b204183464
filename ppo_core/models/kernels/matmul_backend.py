"""Select the library for fp32 matmuls on a CPU: oneDNN for large matrices, MKL for small ones.

PyTorch calls oneDNN if rounding to bfloat16 is allowed
(`torch.set_float32_matmul_precision("medium")`) and the processor has bfloat16 instructions.
Otherwise, PyTorch calls MKL. oneDNN rounds to bfloat16 only on processors with AMX. On other
processors, oneDNN computes in fp32, and is faster than MKL for large matrices. For many small
matrices, as in attention, MKL is faster.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

MAX_ERROR = 1e-5
"""Largest error that counts as fp32 accuracy: the error of a sum of n products of standard normal
numbers, divided by sqrt(n). Measured: MKL 1.5e-6, oneDNN in fp32 3e-6, bfloat16 1.5e-2."""

MIN_NUMEL = 2**19
"""Smallest number of elements of a matrix for which oneDNN is faster than MKL."""

_ONEDNN: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def uses_onednn() -> bool:
    """Return whether PyTorch may now compute fp32 matmuls by oneDNN."""
    return bool(_ONEDNN.fp32_precision == "bf16")


def may_round(device: torch.device) -> bool:
    """Return whether PyTorch is set to round fp32 matmuls on a device."""
    # torch.get_float32_matmul_precision raises if the precision was set for only one backend.
    backend: Any = _ONEDNN if device.type == "cpu" else torch.backends.cuda.matmul
    return backend.fp32_precision not in ("none", "ieee")


@contextmanager
def small_matmuls() -> Iterator[None]:
    """Compute fp32 matmuls by MKL in this context, even if it is inside `large_matmuls`."""
    with _precision("ieee") if uses_onednn() else nullcontext():
        yield


@contextmanager
def large_matmuls(numel: int) -> Iterator[None]:
    """Compute fp32 matmuls by oneDNN in this context, if that is faster and accurate.

    `numel` is the number of elements of the largest weight matrix; smaller matrices in the context
    are also multiplied by oneDNN. A precision that the user has chosen is not changed. The context
    changes a setting of the whole process, so two threads must not be in the context at the same
    time. Inside the context, `torch.get_float32_matmul_precision` raises an error.
    """
    is_chosen = _ONEDNN.fp32_precision not in ("none", "ieee")
    fast = numel >= MIN_NUMEL and not is_chosen and _onednn_is_exact()
    with _precision("bf16") if fast else nullcontext():
        yield


@contextmanager
def _precision(name: str) -> Iterator[None]:
    """Set the precision of fp32 matmuls on the CPU, but not on GPUs."""
    before = _ONEDNN.fp32_precision
    _ONEDNN.fp32_precision = name
    try:
        yield
    finally:
        _ONEDNN.fp32_precision = before


@cache
def _onednn_is_exact() -> bool:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 256, 256, generator=generator)
    with _precision("bf16"), torch.autocast("cpu", enabled=False):
        found = left @ right
    error = (found.double() - left.double() @ right.double()).abs().max()
    return bool(error <= MAX_ERROR * 256**0.5)
