"""Control the memory of a process on the CPU: set up its allocator, and return freed blocks.

The settings affect the whole process, so only commands change them, never a constructor or an
import. This file does not import torch, so that a command can call it before torch is loaded.
"""

import ctypes
import os
import platform

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ONE_MIB, _FOUR_MIB, _ONE_GIB = 2**20, 2**22, 2**30

KEPT_MATMULS = 48
"""Number of compiled matmuls that PyTorch and oneDNN each keep. A forward and backward pass through
one bfloat16 layer needs about 30. If only 24 are kept, training in bfloat16 is slower."""

_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

MOST_FREE = 2**28
"""Bytes of freed blocks that a process may keep. The system must clear returned pages before they
are used again, which takes some hundredths of a second for this number of bytes."""


class _Mallinfo2(ctypes.Structure):
    """The struct of glibc's mallinfo2(3); its field `fordblks` counts the bytes of freed blocks."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        ).split()
    )


def prepare_cpu_process(*, shards_weights: bool = False, trains_adapter: bool = False) -> None:
    """Reuse freed memory and limit the caches of compiled matmuls; call before the first matmul.

    Also set DS_ACCELERATOR to cpu, so that DeepSpeed does not warn that it found no GPU.

    Set `shards_weights` if the process will have shards of the weights, and `trains_adapter` if it
    will train an adapter on rows of many lengths; see `keep_freed_memory`.
    """
    below = _FOUR_MIB if shards_weights else _ONE_GIB
    keep_freed_memory(below=_ONE_MIB if trains_adapter else below)
    keep_few_compiled_matmuls()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def keep_freed_memory(*, below: int = _ONE_GIB) -> None:
    """Reuse freed blocks of less than `below` bytes for later tensors.

    By default glibc returns freed blocks above 32 MiB to the system, which must then clear the
    pages of the next block. Two kinds of processes should return large blocks, because their new
    blocks rarely fit the freed ones:

    - A process with sharded weights gathers layers into blocks of many sizes. If it kept all freed
      blocks, it would need up to twice the memory.
    - In a process that trains an adapter, activations take most of the memory, and their sizes
      change with the rows.

    With another C library, nothing is changed. glibc before 2.35 refuses an mmap threshold above
    32 MiB, and then nothing is changed either: setting only the trim threshold would stop glibc
    from adapting both thresholds.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        if libc.mallopt(_MMAP_THRESHOLD, below):
            libc.mallopt(_TRIM_THRESHOLD, _ONE_GIB)


def release_freed_memory() -> None:
    """Return freed blocks to the system if together they have more than `MOST_FREE` bytes.

    Call this function before a phase of work, and before a training pass if the rows differ in
    length. Freed blocks rarely fit the tensors of the next phase. A process that keeps all freed
    blocks needs nearly as much memory as all its phases together. Only glibc keeps so many freed
    blocks, see `keep_freed_memory`.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return  # glibc before 2.33
    libc.mallinfo2.restype = _Mallinfo2
    if libc.mallinfo2().fordblks > MOST_FREE:
        libc.malloc_trim(0)


def keep_few_compiled_matmuls() -> None:
    """Limit each cache of compiled matmuls to `KEPT_MATMULS`, unless the environment sets a limit.

    oneDNN compiles about 1 MiB of code for each new shape, and training has a new shape for every
    sequence length. By default PyTorch caches 1,024 compiled matmuls, and oneDNN another 1,024.
    Both read their limit at the first matmul of the process, so a later call of this function
    affects only child processes.
    """
    for variable in _CAPACITIES:
        os.environ.setdefault(variable, str(KEPT_MATMULS))
