"""Use smaller batches, or raise a clear error, when the GPU or the machine runs out of memory."""

import gc
import logging
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ppo_core.errors import TrainingError

_Result = TypeVar("_Result")

_LOG = logging.getLogger(__name__)

_OF_THE_MACHINE = "DefaultCPUAllocator: can't allocate memory"

_SIGNS = (_OF_THE_MACHINE, "error: out of memory", "_STATUS_ALLOC_FAILED")
"""Parts of the messages of errors that torch raises as a plain RuntimeError."""


class BatchSize:
    """A batch size that is halved when memory is full, for passes without gradients."""

    def __init__(self, size: int, purpose: str) -> None:
        """Start with `size` rows; `purpose` names the pass in the log, such as "answering"."""
        self._size = size
        self._purpose = purpose

    def run(self, work: Callable[[int], _Result]) -> _Result:
        """Return `work(size)`; whenever memory is full, halve the size and repeat.

        A size that was too large is not tried again. Each new size is logged.

        Raises:
            TrainingError: the memory is too small for a single row.
        """
        while True:
            try:
                return work(self._size)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            # This runs after the block, because the error keeps the failed pass's tensors alive.
            self._halve(reason)

    def _halve(self, reason: str) -> None:
        free_unused()
        if self._size == 1:
            raise TrainingError(
                f"{self._purpose.capitalize()} needs more memory than there is, even with a single "
                f"row in the batch ({_peak(reason)}): {reason} "
                "Use a GPU with more memory, a smaller model, or shorter texts."
            )
        self._size //= 2
        _LOG.warning(
            "%s: the memory was full, so the batch has %d rows from now on.",
            self._purpose.capitalize(),
            self._size,
        )


def free_unused() -> None:
    """Free the memory of unreferenced objects, including cached memory of the GPU."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def explained_out_of_memory(next_move: str) -> Iterator[None]:
    """Turn an out-of-memory error during training into a TrainingError with the peak and advice.

    Raises:
        TrainingError: the memory of a GPU or of the machine is full.
    """
    try:
        yield
    except RuntimeError as error:
        if full := full_memory(error, next_move):
            raise full from error
        raise


def full_memory(error: BaseException, next_move: str) -> TrainingError | None:
    """Return the error to raise in place of `error` if memory is full; otherwise None."""
    if not (isinstance(error, RuntimeError) and is_out_of_memory(error)):
        return None
    return TrainingError(
        f"The training ran out of memory ({_peak(str(error))}): {error} {next_move}"
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether the memory of a GPU or of the machine is full."""
    import torch

    is_full = isinstance(error, torch.OutOfMemoryError)
    return is_full or any(sign in str(error) for sign in _SIGNS)


def _peak(reason: str) -> str:
    """Return this process's peak use of the memory that is full: the GPU's or the machine's."""
    import torch

    if torch.cuda.is_available() and _OF_THE_MACHINE not in reason:
        peak, where = torch.cuda.max_memory_allocated(), "on the GPU"
    else:
        peak, where = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "of the machine"
        peak *= 1 if sys.platform == "darwin" else 1024
    return f"peak {peak / 2**30:.2f} GiB {where}"
