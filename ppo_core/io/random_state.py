"""Save the states of random generators as tensors and JSON, and restore them exactly."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_core.errors import TrainingError

Tensors = Mapping[str, Tensor]
JSON = dict[str, Any]


def generator_tensors(generators: Mapping[str, torch.Generator]) -> dict[str, Tensor]:
    """Return the states of named generators as tensors of bytes."""
    return {name: generator.get_state() for name, generator in generators.items()}


def restore_generators(generators: Mapping[str, torch.Generator], tensors: Tensors) -> None:
    """Restore the states that `generator_tensors` returned.

    Raises:
        TrainingError: the names of the generators or the sizes of their states differ. The size
            depends on the type of the generator's device.
    """
    here = {name: state.shape for name, state in generator_tensors(generators).items()}
    there = {name: state.shape for name, state in tensors.items()}
    if here != there:
        raise TrainingError(
            f"The random generators of the checkpoint, {sorted(there)}, do not fit those of this "
            f"run, {sorted(here)}: names or types of device differ. The samples would differ. "
            "Resume with the version and the type of device that wrote the checkpoint."
        )
    for name, generator in generators.items():
        generator.set_state(tensors[name])


def seed_global_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on all devices.

    `transformers.set_seed` does the same, but it imports peft, which takes a second.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def global_rng_state() -> tuple[dict[str, Tensor], JSON]:
    """Return the states of the global generators of Python, NumPy and torch.

    If there is a GPU, the state of the current GPU's generator is included.
    """
    version, words, python_gauss = random.getstate()
    kind, keys, position, has_gauss, numpy_gauss = np.random.get_state()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors, {
        "python": [version, list(words), python_gauss],
        "numpy": [kind, int(position), int(has_gauss), float(numpy_gauss)],
    }


def restore_global_rng_state(tensors: Tensors, state: JSON) -> None:
    """Restore the states that `global_rng_state` returned.

    If there is no GPU, ignore the state of a GPU's generator.
    """
    version, words, python_gauss = state["python"]
    random.setstate((version, tuple(words), python_gauss))
    kind, *rest = state["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), *rest))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
