"""The precision in which a model is saved; it may differ from the precision of training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import CONFIG_NAME

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def half_precision(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the half precision that a config.json names; None if it names another precision."""
    return _HALVES.get(str(config.get("dtype", config.get("torch_dtype"))))


def cast_weights(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights, cast to `dtype` if they are floating-point.

    Names with the same tensor object, such as tied weights, still share one tensor.
    """
    cast = {
        id(tensor): tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        for tensor in weights.values()
    }
    return {name: cast[id(tensor)] for name, tensor in weights.items()}


def name_dtype(folder: str | Path, dtype: torch.dtype) -> None:
    """Set the precision in a saved model's config.json, where transformers reads it."""
    path = Path(folder) / CONFIG_NAME
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in (config, *config.values()):
        if isinstance(part, dict) and "dtype" in part:
            part["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
