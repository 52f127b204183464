"""Run the passes of a small policy and a small critic on the CPU at the same time, in two threads.

The matmuls of a model with a million weights are too small to keep several cores busy.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch
from torch import nn

from ppo_core.models.kernels.matmul_backend import MIN_NUMEL, uses_onednn

A = TypeVar("A")
B = TypeVar("B")


def run_both(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """Call two functions in two threads; return both results. They must not change shared state.

    Each thread has half of PyTorch's threads. If both functions raise, the error of `second` is
    raised.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    future = _second_thread().submit(first)
    try:
        result = second()
    finally:
        wait([future])
        torch.set_num_threads(threads)
    return future.result(), result


def pays_concurrently(models: Sequence[nn.Module]) -> bool:
    """Return whether concurrent passes are faster, because all weight matrices are small.

    Return False if oneDNN runs the matmuls, because its matmul precision is a process-wide
    setting that two threads cannot change independently.
    """
    is_small = all(weight.numel() < MIN_NUMEL for one in models for weight in one.parameters())
    return is_small and torch.get_num_threads() > 1 and not uses_onednn()


@cache
def _second_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)
