"""Memory of a process that computes on the CPU."""

import ast
import ctypes
import os
import platform
import subprocess
import sys

import pytest
import torch

from ppo_core.models.kernels import cpu_memory
from ppo_core.models.kernels.cpu_memory import (
    keep_few_compiled_matmuls,
    keep_freed_memory,
    prepare_cpu_process,
    release_freed_memory,
)
from tests.helpers.paths import ROOT

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
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    given_back, kept = map(int, printed.stdout.split())
    # 10 x 64 MiB in pages of 4 KiB, or in large ones of 2 MiB.
    assert given_back >= 10 * 32
    assert kept < given_back / 10


FREE_BETWEEN_OTHERS = """
import sys, torch, psutil
from ppo_core.models.kernels.cpu_memory import keep_freed_memory, release_freed_memory

def resident():
    return psutil.Process().memory_info().rss

keep_freed_memory(below=int(sys.argv[2]))
start = resident()
kept = []
for _ in range(int(sys.argv[1])):
    large = torch.ones(2**22)
    kept.append(torch.ones(100))  # so that the freed block is not at the end of the heap
    kept.append(large)
del kept[1::2], large
freed = resident() - start
release_freed_memory()
print(freed, resident() - start)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
@pytest.mark.parametrize(
    ("blocks", "below", "kept_before", "kept_after"),
    [
        (32, 2**30, True, False),
        # Less than MOST_FREE is kept: the next phase needs it.
        pytest.param(8, 2**30, True, True, marks=pytest.mark.slow),
        # Blocks of sharded weights are returned at once.
        pytest.param(32, 2**22, False, False, marks=pytest.mark.slow),
    ],
)
def test_many_freed_blocks_are_returned_before_a_phase(blocks, below, kept_before, kept_after):
    command = [sys.executable, "-c", FREE_BETWEEN_OTHERS, str(blocks), str(below)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    before, after = (int(size) > blocks * 2**24 * 0.8 for size in printed.stdout.split())
    assert (before, after) == (kept_before, kept_after)


class FakeLibc:
    """A C library that accepts or refuses every parameter."""

    def __init__(self, *, accepts: bool) -> None:
        self.accepts = accepts
        self.set: list[tuple[int, int]] = []

    def mallopt(self, parameter: int, value: int) -> int:
        self.set.append((parameter, value))
        return int(self.accepts)


CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
TRIM, MMAP = -1, -3


@pytest.mark.parametrize(
    ("name", "accepts", "expected"),
    [
        ("glibc", True, [(MMAP, 2**30), (TRIM, 2**30)]),
        ("glibc", False, [(MMAP, 2**30)]),
        ("", True, []),
    ],
    ids=["accepted", "refused by an older glibc", "another C library"],
)
def test_the_second_threshold_is_set_only_after_the_first(name, accepts, expected, monkeypatch):
    libc = FakeLibc(accepts=accepts)
    monkeypatch.setattr(platform, "libc_ver", lambda: (name, ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    keep_freed_memory()
    assert libc.set == expected


@pytest.mark.parametrize(
    ("training", "below"),
    [({}, 2**30), ({"shards_weights": True}, 2**22), ({"trains_adapter": True}, 2**20)],
)
def test_each_training_returns_the_blocks_that_it_rarely_reuses(training, below, monkeypatch):
    libc = FakeLibc(accepts=True)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    for name in CAPACITIES:
        monkeypatch.setenv(name, "48")
    prepare_cpu_process(**training)
    assert libc.set == [(MMAP, below), (TRIM, 2**30)]


def test_capacities_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CAPACITIES[0], "7")
    monkeypatch.setenv(CAPACITIES[1], "")  # restored afterwards
    monkeypatch.delenv(CAPACITIES[1])
    keep_few_compiled_matmuls()
    assert [os.environ[name] for name in CAPACITIES] == ["7", str(cpu_memory.KEPT_MATMULS)]


GROWTH = """
import sys, psutil, torch
from ppo_core.models.kernels.cpu_memory import keep_few_compiled_matmuls

def mebibytes():
    return psutil.Process().memory_info().rss / 2**20

if sys.argv[1] == "few":
    keep_few_compiled_matmuls()
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
    environment = {name: value for name, value in os.environ.items() if name not in CAPACITIES}
    command = [sys.executable, "-c", GROWTH, kept]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    return float(printed.stdout)


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16", False),
    reason="a processor whose bfloat16 matmuls need no oneDNN",
)
def test_a_process_does_not_grow_with_each_new_shape():
    assert growth("few") < growth("all") / 3


COMMANDS = {
    "ppo_core/__main__.py",
    "ppo_core/supervised/supervised_cli.py",
    "ppo_core/training/speed/__main__.py",
    "flows/pipeline/settings/environment.py",
}


def test_only_commands_change_the_process():
    users = set()
    for path in [*(ROOT / "ppo_core").rglob("*.py"), *(ROOT / "flows").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == cpu_memory.__name__:
                names = {alias.name for alias in node.names} - {release_freed_memory.__name__}
                users |= {str(path.relative_to(ROOT))} if names else set()
    assert users == COMMANDS


SNAPSHOTS = """
import gc, os, torch

def process():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    collection = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    # torch sets this one when bitsandbytes imports its compiler.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": ""}
    return environment, threads, precision, collection

before = process()
import ppo_core.training.trainer, ppo_core.training.answer_prompts
import ppo_core.supervised.training, ppo_core.trl.classic.classic_trainer
assert process() == before, (process(), before)
"""


@pytest.mark.slow
def test_an_import_changes_nothing_of_the_process():
    subprocess.run([sys.executable, "-c", SNAPSHOTS], cwd=ROOT, check=True, timeout=300)
