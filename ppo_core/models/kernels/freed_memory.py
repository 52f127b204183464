"""Return freed memory of a process that computes on the CPU to the system."""

import ctypes
import platform

MOST_FREE = 2**28
"""Bytes of freed blocks that a process may keep. The system must clear returned pages before they
are used again, which takes some hundredths of a second for this number of bytes."""


class _Mallinfo2(ctypes.Structure):
    """The struct of glibc's mallinfo2(3), whose `fordblks` are the bytes of freed blocks."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        ).split()
    )


def release_freed_memory() -> None:
    """Return freed blocks to the system if together they have more than `MOST_FREE` bytes.

    Call this function before a phase of work, and before a training pass if the rows differ in
    length. Freed blocks rarely fit the tensors of the next phase. A process that keeps all freed
    blocks needs nearly as much memory as all its phases together. Only glibc keeps so many freed
    blocks, see `cpu_memory.keep_freed_memory`.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return  # glibc before 2.33
    libc.mallinfo2.restype = _Mallinfo2
    if libc.mallinfo2().fordblks > MOST_FREE:
        libc.malloc_trim(0)
