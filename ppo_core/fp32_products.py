"""fp32 matrix products on the CPU, by the faster of the two libraries that PyTorch has for them.

At "medium" PyTorch hands products to oneDNN where the processor knows bfloat16, and keeps to MKL
elsewhere. oneDNN may then round to bfloat16, which it does on processors with AMX; on others it
computes in fp32 all the same. On two cores of a Zen 4 it multiplies 936 rows by matrices of
256 x 1024 at 200 to 220 GFLOP/s where MKL has 130 to 180. Many small products, as attention has,
take it longer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

MOST_ERROR = 1e-5
"""Largest error of a sum of n products of normal numbers, in units of sqrt(n), that counts as
fp32: MKL is off by 1.5e-6, oneDNN by 3e-6, bfloat16 by 1.5e-2."""


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Multiply fp32 matrices at another of PyTorch's precisions inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def fast_fp32_products() -> Iterator[None]:
    """Multiply large matrices by oneDNN inside, where that is exact and nothing else was chosen."""
    chosen = torch.get_float32_matmul_precision()
    fast = chosen == "highest" and _onednn_is_exact()
    with matmul_precision("medium" if fast else chosen):
        yield


@cache
def _onednn_is_exact() -> bool:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 256, 256, generator=generator)
    with matmul_precision("medium"):
        product = left @ right
    error = (product.double() - left.double() @ right.double()).abs().max()
    return bool(error <= MOST_ERROR * 256**0.5)
