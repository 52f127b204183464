"""fp32 matrix products on the CPU, by the faster of the two libraries that PyTorch has for them.

Where fp32 products may be rounded to bfloat16 (`torch.set_float32_matmul_precision("medium")`)
and the processor knows it, PyTorch hands them to oneDNN, else to MKL. On processors with AMX oneDNN
does round; on others it computes in fp32 all the same. On two cores of a Zen 4 it multiplied 144
states of 256 numbers by a head of 50,304 rows in 23 ms where MKL took 36, and all three products of
a step in 69 and not 83. Many small products, as attention has, take it longer.

It prepares itself for each new shape (`prepared_products`), which pays with large matrices alone:
with layers of 512 x 1,376 a whole update took 0.82 of the time, with 256 x 1,024 as long.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

MOST_ERROR = 1e-5
"""Largest error of a sum of n products of normal numbers, in units of sqrt(n), that counts as
fp32: MKL is off by 1.5e-6, oneDNN by 3e-6, bfloat16 by 1.5e-2."""

LEAST_NUMBERS = 2**19
"""Numbers of a matrix from which on products with it are large; with fewer nothing is gained."""

_LIBRARY: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def are_by_onednn() -> bool:
    """Whether products are oneDNN's at present."""
    return bool(_LIBRARY.fp32_precision == "bf16")


@contextmanager
def small_products() -> Iterator[None]:
    """Multiply many small matrices inside: by MKL, also where oneDNN was chosen."""
    with _precision("ieee") if are_by_onednn() else nullcontext():
        yield


@contextmanager
def products_with(numbers: int) -> Iterator[None]:
    """Multiply by a matrix of so many numbers inside.

    By oneDNN, if that is many, it is exact, and nothing else was chosen; smaller ones are
    multiplied by the same then. Not in two threads at once: the choice is the whole process's.
    Inside, PyTorch's older name for the precision (`torch.get_float32_matmul_precision`) cannot be
    asked for.
    """
    is_chosen = _LIBRARY.fp32_precision not in ("none", "ieee")
    fast = numbers >= LEAST_NUMBERS and not is_chosen and _onednn_is_exact()
    with _precision("bf16") if fast else nullcontext():
        yield


@contextmanager
def _precision(name: str) -> Iterator[None]:
    """That of the processor alone; GPUs have their own."""
    before = _LIBRARY.fp32_precision
    _LIBRARY.fp32_precision = name
    try:
        yield
    finally:
        _LIBRARY.fp32_precision = before


@cache
def _onednn_is_exact() -> bool:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 256, 256, generator=generator)
    with _precision("bf16"), torch.autocast("cpu", enabled=False):
        product = left @ right
    error = (product.double() - left.double() @ right.double()).abs().max()
    return bool(error <= MOST_ERROR * 256**0.5)
