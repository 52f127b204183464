"""Choose the device and the weight precision of a model that is used but not trained."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

_CONTAINER = Path("/sys/fs/cgroup")
"""Folder that describes the control group of this process in a container."""

SMALLEST_WIDTH = 192
"""Smallest hidden size at which bfloat16 is faster than fp32 on a CPU."""

Precision: TypeAlias = Literal["auto", "fp32", "bf16"]
"""Precision of a model that is not trained: "auto" is bfloat16 on a GPU that supports bfloat16, and
float32 elsewhere."""


@dataclass(frozen=True)
class Placement:
    """Device and precision of a model's weights."""

    device: "torch.device"
    dtype: "torch.dtype"


def is_fast_in_bf16(width: int, *, use_cpu: bool) -> bool:
    """Return whether bfloat16 autocast is fast on this machine for the hidden size `width`."""
    # Imported here, because modules that only use `Precision` need no torch.
    import torch

    if torch.cuda.is_available() and not use_cpu:
        return _computes_in_bf16()
    can = torch.cpu.get_capabilities()
    has_units = can.get("avx512_bf16", False) or can.get("amx_bf16", False)
    return has_units and width >= SMALLEST_WIDTH


def placement_for_reading(precision: Precision = "fp32") -> Placement:
    """Return the placement of a model that only answers or scores.

    The device is a GPU if there is one. Each of several processes on a machine uses its own GPU.
    The default is float32, because a reward model's scores in bfloat16 depend on the batch.
    """
    import torch

    gpu = _gpu()
    if precision == "auto":
        precision = "bf16" if gpu and _computes_in_bf16() else "fp32"
    return Placement(
        gpu or torch.device("cpu"), torch.bfloat16 if precision == "bf16" else torch.float32
    )


def free_memory(device: "torch.device") -> int:
    """Return the free memory of a GPU, or of this machine or container, in bytes."""
    import psutil
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free: int = psutil.virtual_memory().available
    return int(min(free, _left_in_container(_CONTAINER)))


def main_memory() -> int:
    """Return the memory of this machine, or the limit of its container if less, in bytes."""
    import psutil

    return int(min(psutil.virtual_memory().total, _limit_of_container(_CONTAINER)))


def _limit_of_container(folder: Path) -> float:
    """Return the memory limit of a control group (version 2) in bytes; infinity without a limit."""
    limit = folder / "memory.max"
    if not limit.is_file() or (most := limit.read_text().strip()) == "max":
        return math.inf
    return int(most)


def _left_in_container(folder: Path) -> float:
    """Return the free bytes of a control group (version 2); infinity if it has no limit."""
    if math.isinf(most := _limit_of_container(folder)):
        return most
    used = int((folder / "memory.current").read_text())
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    # Cached files count as free, because the kernel drops them when processes need memory.
    return most - used + int(stat["inactive_file"])


def _gpu() -> "torch.device | None":
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _computes_in_bf16() -> bool:
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)
