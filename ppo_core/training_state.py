"""Optimizer and randomness as tensors and plain JSON, and back to the bit, without pickle."""

import random
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ppo_core.checkpoint import JSON, Tensors
from ppo_core.errors import TrainingError


def flatten_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], JSON]:
    """The optimizer's state: tensors by "<parameter>.<name>", not copied, and all else."""
    saved = optimizer.state_dict()
    entries = {
        f"{number}.{name}": value
        for number, named in saved["state"].items()
        for name, value in named.items()
    }
    tensors = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
    return tensors, {
        "kind": type(optimizer).__name__,
        "shapes": _shapes(optimizer),
        "groups": saved["param_groups"],
        "tensors": sorted(tensors),
        "scalars": {key: value for key, value in entries.items() if key not in tensors},
    }


def restore_optimizer(optimizer: Optimizer, tensors: Tensors, state: JSON) -> None:
    """Put back what `flatten_optimizer` gave, to the bit.

    Raises:
        TrainingError: the state belongs to another optimizer or to other parameters. It is never
            started afresh instead (NeMo-RL #3171).
    """
    if misfit := _misfit(optimizer, tensors, state):
        raise TrainingError(
            f"The optimizer state of the checkpoint does not fit: {misfit}. Without it training "
            "would start its moments afresh. Resume with the models and settings that wrote the "
            "checkpoint, or start a new run from its policy."
        )
    entries: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **state["scalars"]}.items():
        number, _, name = key.partition(".")
        entries.setdefault(int(number), {})[name] = (
            value.clone() if isinstance(value, Tensor) else value
        )
    groups = [
        _with_tuples(saved, current)
        for saved, current in zip(state["groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
    _restore_precision(optimizer, tensors)


def _misfit(optimizer: Optimizer, tensors: Tensors, state: JSON) -> str | None:
    """What is different, in words; None where the state fits."""
    kind = type(optimizer).__name__
    if state["kind"] != kind:
        return f"it is that of {state['kind']}, here is {kind}"
    there, here = state["shapes"], _shapes(optimizer)
    if [len(group) for group in there] != [len(group) for group in here]:
        return (
            f"its groups have {[len(group) for group in there]} parameters, here they have "
            f"{[len(group) for group in here]}"
        )
    pairs = zip(chain(*there), chain(*here), strict=True)
    for number, (saved, current) in enumerate(pairs):
        if saved != current:
            return f"parameter {number} has the shape {saved} there and {current} here"
    if different := set(state["tensors"]) ^ set(tensors):
        return f"the tensor {min(different)} is missing or does not belong to it"
    return None


def _shapes(optimizer: Optimizer) -> list[list[list[int]]]:
    return [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]


def _with_tuples(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, with a tuple (Adam's betas) where the optimizer has one: JSON has none."""
    return {
        name: tuple(value) if isinstance(current.get(name), tuple) else value
        for name, value in saved.items()
    }


def _restore_precision(optimizer: Optimizer, tensors: Tensors) -> None:
    """Undo torch's casting of the state to the precision of the parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        named = optimizer.state[parameters[int(number)]]
        if named[name].dtype != tensor.dtype:
            named[name] = tensor.to(named[name].device, copy=True)


# --- Randomness ----------------------------------------------------------------


def generator_tensors(generators: Mapping[str, torch.Generator]) -> dict[str, Tensor]:
    """The states of named generators, as bytes."""
    return {name: generator.get_state() for name, generator in generators.items()}


def restore_generators(generators: Mapping[str, torch.Generator], tensors: Tensors) -> None:
    """Put back what `generator_tensors` gave.

    Raises:
        TrainingError: there are other generators, or generators of another kind of device.
    """
    here = {name: state.shape for name, state in generator_tensors(generators).items()}
    there = {name: state.shape for name, state in tensors.items()}
    if here != there:
        raise TrainingError(
            f"The random generators of the checkpoint, {sorted(there)}, are not those of this run, "
            f"{sorted(here)}, or were on another kind of device: its samples would be others. "
            "Resume with the version and on the kind of device that wrote it."
        )
    for name, generator in generators.items():
        generator.set_state(tensors[name])


def global_rng_state() -> tuple[dict[str, Tensor], JSON]:
    """The states of Python's, NumPy's and torch's own generators.

    With a GPU also that of the current one; it is put back where there is a GPU again.
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
    """Put back what `global_rng_state` gave."""
    version, words, python_gauss = state["python"]
    random.setstate((version, tuple(words), python_gauss))
    kind, *rest = state["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), *rest))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
