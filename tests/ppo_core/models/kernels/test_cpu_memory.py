"""Memory that is freed and allocated again."""

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, torch
from ppo_core.models.kernels.cpu_memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def of_large_tensors():
    before = faults()
    for _ in range(10):
        torch.empty(2**24).fill_(1)
    return faults() - before

given_back = of_large_tensors()
keep_freed_memory()
of_large_tensors()  # until the memory is one piece
print(given_back, of_large_tensors())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_a_large_tensor_takes_the_memory_of_the_one_before():
    command = [sys.executable, "-c", COUNT_FAULTS]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    given_back, kept = map(int, said.stdout.split())
    # 10 x 64 MiB in pages of 4 KiB, or in large ones of 2 MiB.
    assert given_back >= 10 * 32
    assert kept < given_back / 10
