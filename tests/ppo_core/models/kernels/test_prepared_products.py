"""Memory of products whose shapes differ."""

import os
import subprocess
import sys

import pytest
import torch

GROWTH = """
import sys, psutil, torch
from ppo_core.models.kernels.prepared_products import keep_few_prepared_products

def mebibytes():
    return psutil.Process().memory_info().rss / 2**20

if sys.argv[1] == "few":
    keep_few_prepared_products()
matrix, rows = torch.ones(768, 192).bfloat16(), torch.ones(1200, 192).bfloat16()

def multiply(counts):
    before = mebibytes()
    for count in counts:
        torch.nn.functional.linear(rows[:count], matrix)
    return mebibytes() - before

multiply(range(300, 600, 5))  # more than are kept
print(multiply(range(600, 1200, 5)))
"""


def growth(kept: str) -> float:
    """MiB by which a process grows with 120 further shapes."""
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", GROWTH, kept]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    return float(said.stdout)


@pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16", False),
    reason="a processor whose products in bfloat16 need no oneDNN",
)
def test_a_process_does_not_grow_with_each_new_shape():
    assert growth("few") < growth("all") / 3
