"""Where a model goes in a step that only reads it: its device and the precision of its weights."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

Precision: TypeAlias = Literal["auto", "fp32", "bf16"]
"""Precision of a model that is only read: "auto" is bfloat16 on a GPU that computes in it, and
float32 elsewhere."""


@dataclass(frozen=True)
class Placement:
    """Device and precision of a model's weights."""

    device: "torch.device"
    dtype: "torch.dtype"


def placement_for_reading(precision: Precision = "fp32") -> Placement:
    """Return the placement of a model that answers or scores, and is not trained.

    The device is a GPU if there is one. Of several processes on a machine, each takes its own GPU.
    Reward models are read in float32, as PPO reads them: scores in bfloat16 depend on the batch.
    """
    # Imported here, because settings name a `Precision` where torch is not needed.
    import torch

    gpu = _gpu()
    if precision == "auto":
        precision = "bf16" if gpu and _computes_in_bf16() else "fp32"
    return Placement(
        gpu or torch.device("cpu"), torch.bfloat16 if precision == "bf16" else torch.float32
    )


def _gpu() -> "torch.device | None":
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _computes_in_bf16() -> bool:
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)
