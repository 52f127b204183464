"""What the checkpoint of any training has: weights, optimizer, schedule, and random states.

Tensors are written unsharded, by parameter name, so a checkpoint can be resumed with any number of
processes and any sharding.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ppo_core.checkpointing.files import Checkpoint
from ppo_core.checkpointing.fingerprint import Fingerprint
from ppo_core.checkpointing.optimizer_options import (
    check_optimizer_fits,
    restore_options,
    set_schedule_step,
)
from ppo_core.distributed.engine import Engine
from ppo_core.errors import PPOError, TrainingError
from ppo_core.ppo.random_state import global_rng_state, restore_global_rng_state

OPTIMIZER, PROCESS = "optimizer", "process"
"""Names of tensor groups in a checkpoint."""

logger = logging.getLogger(__name__)


def random_part(engine: Engine) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, str]]:
    """Return the random states of this process, as groups of tensors and as JSON documents."""
    rng, numbers = global_rng_state()
    process = f"{PROCESS}-{engine.rank}"
    return {process: rng}, {f"{process}.json": json.dumps(numbers)}


def restore_random_part(checkpoint: Checkpoint, engine: Engine) -> None:
    """Restore the random states of this process, or of another if there were fewer processes."""
    process = f"{PROCESS}-{engine.rank % checkpoint.state['processes']}"
    rng = load_file(checkpoint.folder / f"{process}.safetensors")
    restore_global_rng_state(rng, checkpoint.document(f"{process}.json"))


def optimizer_part(
    engine: Engine, module: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, list[str]]]:
    """Return the optimizer states that this process writes, and each parameter's state keys."""
    loads = [0] * engine.num_processes
    share: dict[str, Tensor] = {}
    kept = {}
    for name, state in engine.optimizer_states(module, optimizer):
        kept[name] = list(state)
        rank = loads.index(min(loads))
        loads[rank] += sum(tensor.nbytes for tensor in state.values())
        if rank == engine.rank:
            share |= {f"{name}/{key}": copied(tensor) for key, tensor in state.items()}
    return {f"{OPTIMIZER}-{engine.rank}": share}, kept


def restore_optimizer(
    checkpoint: Checkpoint, engine: Engine, module: nn.Module, optimizer: Optimizer
) -> None:
    """Restore the states that `optimizer_part` returned in all processes.

    Raises:
        TrainingError: the states are of other parameters.
    """
    kept, saved = checkpoint.state["kept"], checkpoint.tensors(OPTIMIZER)
    asked = set()

    def state_of(name: str) -> dict[str, Tensor]:
        asked.add(name)
        return {key: saved[f"{name}/{key}"] for key in kept.get(name, ())}

    engine.load_optimizer_states(module, optimizer, state_of)
    if strange := asked ^ kept.keys():
        raise TrainingError(
            f"The optimizer state in the checkpoint '{checkpoint.folder}' is for other "
            f"parameters than in this run, for example {min(strange)}. Moments would start "
            "from zero. Resume with the models that wrote the checkpoint, or start a new run "
            "from the checkpoint's policy."
        )


def restore_schedule(
    checkpoint: Checkpoint, optimizer: Optimizer, scheduler: LRScheduler, *, is_same: bool
) -> None:
    """Restore the options of the optimizer and the step of the schedule.

    If the run is not the `same`, rates and options are those of the new settings.
    """
    state = checkpoint.state
    if is_same or not isinstance(scheduler, LambdaLR):
        restore_options(optimizer, state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    else:
        set_schedule_step(scheduler, state["scheduler"]["last_epoch"])


def full_weights(engine: Engine, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return unsharded copies of parameters; an empty dict outside the main process."""
    full = engine.full_state_dict(nn.ParameterList(parameters.values()))
    return dict(zip(parameters, full.values(), strict=True)) if full is not None else {}


def begin_restoring(
    checkpoint: Checkpoint,
    fingerprint: Fingerprint,
    engine: Engine,
    module: nn.Module,
    optimizer: Optimizer,
    *,
    anyway: bool,
) -> bool:
    """Check that a checkpoint fits a run, and drop gradients; return whether the runs are the same.

    Raises:
        TrainingError: the optimizer is another; or settings, data or models are others, and
            `anyway` is off.
    """
    is_same = _check_same_run(checkpoint, fingerprint, is_main=engine.is_main, anyway=anyway)
    check_optimizer_fits(optimizer, checkpoint.state["optimizer"])
    # Drop gradients that an earlier error may have left.
    engine.discard(module, optimizer)
    return is_same


def _check_same_run(
    checkpoint: Checkpoint, fingerprint: Fingerprint, *, is_main: bool, anyway: bool
) -> bool:
    different = fingerprint.differences(checkpoint.state["identity"])
    if not different:
        return True
    differences = "; ".join(different)
    if not anyway:
        raise TrainingError(
            f"The checkpoint '{checkpoint.folder}' was {differences}. The resumed run would "
            "match neither configuration. Resume with the settings and models of the "
            "checkpoint, start a new run from the checkpoint's policy, or set --resume_anyway "
            "(resume_anyway=True)."
        )
    if is_main:
        logger.warning("Resuming anyway: '%s' was %s.", checkpoint.folder, differences)
    return False


@contextmanager
def explained_form(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise a TrainingError if a file of the checkpoint has another form than expected."""
    try:
        yield
    except PPOError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OSError, SafetensorError) as e:
        raise TrainingError(
            f"The checkpoint '{checkpoint.folder}' cannot be restored, because a file of it "
            f"has another form than this version writes: {type(e).__name__}: {e}. Resume from "
            "an earlier checkpoint, or with the version that wrote this one."
        ) from e


def log_resumed(checkpoint: Checkpoint, engine: Engine, unit: str) -> None:
    """Log from where a run continues; `unit` is what its steps are."""
    if engine.is_main:
        done = checkpoint.state["step"]
        logger.warning("Resumed from %s: %d %s are done.", checkpoint.folder, done, unit)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU."""
    return tensor.detach().to("cpu", copy=True)
