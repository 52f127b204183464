"""fp32 matmuls on the CPU: oneDNN for large matrices, MKL for small ones.

PyTorch hands fp32 matmuls to oneDNN where they may be rounded to bfloat16
(`torch.set_float32_matmul_precision("medium")`) and the processor has bfloat16 units, and to MKL
elsewhere. oneDNN rounds on processors with AMX and computes in fp32 on others, where it is
faster than MKL for large matrices. MKL is faster for many small ones, as in attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

MAX_ERROR = 1e-5
"""Largest error of a sum of n products of normal numbers, in units of sqrt(n), that counts as
fp32: MKL has 1.5e-6, oneDNN in fp32 3e-6, bfloat16 1.5e-2."""

MIN_NUMEL = 2**19
"""Elements of a matrix that oneDNN multiplies faster than MKL."""

_ONEDNN: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def uses_onednn() -> bool:
    """Return whether fp32 matmuls go to oneDNN now."""
    return bool(_ONEDNN.fp32_precision == "bf16")


@contextmanager
def small_matmuls() -> Iterator[None]:
    """Hand fp32 matmuls to MKL inside, also within `large_matmuls`."""
    with _precision("ieee") if uses_onednn() else nullcontext():
        yield


@contextmanager
def large_matmuls(numel: int) -> Iterator[None]:
    """Hand fp32 matmuls to oneDNN inside, if that is faster, exact, and nothing else was chosen.

    `numel` is the number of elements of the matrix that is multiplied by; smaller matrices inside
    go to oneDNN too. The choice is global to the process: do not enter in two threads at once.
    `torch.get_float32_matmul_precision` raises inside.
    """
    is_chosen = _ONEDNN.fp32_precision not in ("none", "ieee")
    fast = numel >= MIN_NUMEL and not is_chosen and _onednn_is_exact()
    with _precision("bf16") if fast else nullcontext():
        yield


@contextmanager
def _precision(name: str) -> Iterator[None]:
    """Set the precision of fp32 matmuls on the CPU alone."""
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
