"""Run the passes of a small policy and a small critic on the CPU at the same time, in two threads.

The matmuls of a model with a million weights are too small to keep several cores busy.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from ppo_core.models.kernels.matmul_backend import MIN_NUMEL, uses_onednn

A = TypeVar("A")
B = TypeVar("B")


@contextmanager
def two_threads(*, enabled: bool) -> Iterator[ThreadPoolExecutor | None]:
    """Yield a second thread for `run_both`, or None if not enabled.

    Inside the context each thread has half of PyTorch's threads.
    """
    if not enabled:
        yield None
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        with ThreadPoolExecutor(1) as second_thread:
            yield second_thread
    finally:
        torch.set_num_threads(threads)


def run_both(
    second_thread: ThreadPoolExecutor, first: Callable[[], A], second: Callable[[], B]
) -> tuple[A, B]:
    """Call two functions in two threads; return both results. They must not change shared state.

    If both functions raise, the error of `second` is raised.
    """
    future = second_thread.submit(first)
    result = second()
    return future.result(), result


def pays_concurrently(models: Sequence[nn.Module]) -> bool:
    """Return whether concurrent passes are faster, because all weight matrices are small.

    Return False if oneDNN runs the matmuls, because its matmul precision is a process-wide
    setting that two threads cannot change independently.
    """
    is_small = all(weight.numel() < MIN_NUMEL for one in models for weight in one.parameters())
    return is_small and torch.get_num_threads() > 1 and not uses_onednn()
