"""Options of the optimizer and randomness as tensors and plain JSON, and back to the bit."""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ppo_core.checkpointing.files import JSON, Tensors
from ppo_core.errors import TrainingError

# --- The optimizer -------------------------------------------------------------

EXECUTION = {"params", "fused", "foreach", "capturable", "differentiable"}
"""Options of a group that say how a step is computed, which follows from the machine."""


def optimizer_options(optimizer: Optimizer) -> JSON:
    """What kind of optimizer it is, and what its groups are set to."""
    return {
        "kind": type(optimizer).__name__,
        "groups": [
            {name: value for name, value in group.items() if name not in EXECUTION}
            for group in optimizer.param_groups
        ],
    }


def restore_options(optimizer: Optimizer, saved: JSON) -> None:
    """Put back what `optimizer_options` gave."""
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        for name, value in options.items():
            # JSON has no tuples, which Adam's betas are.
            group[name] = tuple(value) if isinstance(group.get(name), tuple) else value


def check_optimizer_fits(optimizer: Optimizer, saved: JSON) -> None:
    """Refuse the state of another optimizer, or of one with another number of groups.

    It is never started afresh instead (NeMo-RL #3171).

    Raises:
        TrainingError: it is; the message says what is different.
    """
    kind, number = type(optimizer).__name__, len(optimizer.param_groups)
    if saved["kind"] != kind:
        misfit = f"it is that of {saved['kind']}, here is {kind}"
    elif len(saved["groups"]) != number:
        misfit = f"it has {len(saved['groups'])} groups of parameters, here are {number}"
    else:
        return
    raise TrainingError(
        f"The optimizer state of the checkpoint does not fit: {misfit}. Without it training "
        "would start its moments afresh. Resume with the models and settings that wrote the "
        "checkpoint, or start a new run from its policy."
    )


def set_course(scheduler: LambdaLR, step: int) -> None:
    """The learning rates that a schedule has after so many steps."""
    scheduler.last_epoch = step
    courses = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [base * course(step) for base, course in courses]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


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
