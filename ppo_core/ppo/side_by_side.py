"""Two computations on the CPU, one after the other or at the same time.

The products of a model of a million weights are too small for several cores. On two busy cores an
update of policy and critic took 2.20 s one after the other with two threads, and 1.76 s side by
side with one each (medians of 15), which do not wait for each other when another process takes a
core for a moment.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


class Both(Protocol):
    """Calls two functions that share nothing they write to; what they return."""

    def __call__(self, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
        """Call them."""
        ...


def one_after_the_other(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """What needs less memory."""
    return first(), second()


@contextmanager
def side_by_side() -> Iterator[Both]:
    """What is faster where one cannot keep all cores busy: each has half of the threads inside.

    Where both raise an error, that of the second is raised.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        with ThreadPoolExecutor(1) as other_thread:

            def both(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
                begun = other_thread.submit(first)
                of_second = second()
                return begun.result(), of_second

            yield both
    finally:
        torch.set_num_threads(threads)
