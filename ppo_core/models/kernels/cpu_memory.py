"""Memory of a process that computes on the CPU: settings for all of it, made by our commands.

No constructor and no import calls these functions. They import no torch, so that a command can call
them first.
"""

import ctypes
import os
import platform

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ONE_GIB = 2**30

KEPT_MATMULS = 48
"""Shapes whose compiled matmuls are kept. A forward and backward pass through one bfloat16 layer
needs about thirty; half of 48 makes such a training slower."""

_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def prepare_cpu_process() -> None:
    """Keep freed memory and few compiled matmuls in this process, before its first matmul."""
    keep_freed_memory()
    keep_few_compiled_matmuls()


def keep_freed_memory() -> None:
    """Reuse freed blocks of up to 1 GiB for later tensors.

    By default glibc returns blocks above 32 MiB to the system when they are freed, and the system
    must clear the pages of the next one. Other C libraries are left alone, and so is a glibc
    before 2.35: it refuses the first threshold, and the second alone would turn off its own
    adaptation.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        if libc.mallopt(_MMAP_THRESHOLD, _ONE_GIB):
            libc.mallopt(_TRIM_THRESHOLD, _ONE_GIB)


def keep_few_compiled_matmuls() -> None:
    """Limit the caches of compiled matmuls to `KEPT_MATMULS`, unless the environment sets them.

    oneDNN compiles about 1 MiB of code for each new shape; PyTorch keeps 1,024 and oneDNN 1,024
    more. Training has a new shape for every sequence length. Both read their variable at the
    first matmul of the process, so a later call changes nothing here; child processes inherit it.
    """
    for variable in _CAPACITIES:
        os.environ.setdefault(variable, str(KEPT_MATMULS))
