"""The state that all checkpoints contain besides weights: optimizer, schedule, random states.

Tensors are written unsharded, by parameter name, so a checkpoint can be resumed with any number of
processes and any sharding.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ppo_core.checkpointing.fingerprint import Fingerprint
from ppo_core.checkpointing.optimizer_options import (
    check_optimizer_fits,
    optimizer_options,
    restore_options,
    restore_schedule,
    set_schedule_step,
)
from ppo_core.checkpointing.read_checkpoint import Checkpoint
from ppo_core.distributed.engine import Engine
from ppo_core.errors import PPOError, TrainingError
from ppo_core.io.random_state import global_rng_state, restore_global_rng_state

OPTIMIZER, PROCESS = "optimizer", "process"
"""Names of tensor groups in a checkpoint."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Optimizer, schedule and random states of a run; all processes must call the methods."""

    engine: Engine
    module: nn.Module
    """The trained module, as the engine prepared it."""

    optimizer: Optimizer
    scheduler: LRScheduler
    fingerprint: Fingerprint

    def part(self) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, str], dict[str, Any]]:
        """Return a copy of the state that this process writes, without the weights.

        Returns:
            Groups of tensors, the text of JSON files, and entries of trainer_state.json.
        """
        rng, numbers = global_rng_state()
        process = f"{PROCESS}-{self.engine.rank}"
        share, kept = self._optimizer_share()
        groups: dict[str, Mapping[str, Tensor]] = {
            process: rng,
            f"{OPTIMIZER}-{self.engine.rank}": share,
        }
        entries = {
            "processes": self.engine.num_processes,
            "identity": asdict(self.fingerprint),
            "optimizer": optimizer_options(self.optimizer),
            "kept": kept,
            "scheduler": self.scheduler.state_dict(),
        }
        return groups, {f"{process}.json": json.dumps(numbers)}, entries

    def _optimizer_share(self) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
        """Return the optimizer states that this process writes, and each parameter's state keys."""
        loads = [0] * self.engine.num_processes
        share: dict[str, Tensor] = {}
        kept = {}
        for name, state in self.engine.optimizer_states(self.module, self.optimizer):
            kept[name] = list(state)
            rank = loads.index(min(loads))
            loads[rank] += sum(tensor.nbytes for tensor in state.values())
            if rank == self.engine.rank:
                share |= {f"{name}/{key}": copied(tensor) for key, tensor in state.items()}
        return share, kept

    # --- Resuming: call in this order, and load the weights after `begin_restoring` ---

    def begin_restoring(self, checkpoint: Checkpoint, *, anyway: bool) -> bool:
        """Check that a checkpoint fits the run; return whether both have the same fingerprint.

        Raises:
            TrainingError: the optimizer differs, or settings, data or models differ and `anyway` is
                off.
        """
        is_same = self._check_same_run(checkpoint, anyway=anyway)
        check_optimizer_fits(self.optimizer, checkpoint.state["optimizer"])
        # Drop gradients that an earlier error may have left.
        self.engine.discard(self.module, self.optimizer)
        return is_same

    def restore_optimizer(self, checkpoint: Checkpoint, *, is_same: bool) -> None:
        """Restore optimizer and schedule.

        If `is_same` is False and the schedule is a LambdaLR, learning rates and options come from
        the settings of this run, not from the checkpoint.

        Raises:
            TrainingError: the optimizer states belong to other parameters.
        """
        self._restore_optimizer_states(checkpoint)
        state = checkpoint.state
        if is_same or not isinstance(self.scheduler, LambdaLR):
            restore_options(self.optimizer, state["optimizer"])
            restore_schedule(self.scheduler, state["scheduler"])
        else:
            set_schedule_step(self.scheduler, state["scheduler"]["last_epoch"])

    def finish_restoring(self, checkpoint: Checkpoint, unit: str) -> None:
        """Restore the random states, and log how many steps are done.

        `unit` is the word for steps in the log message. If the run has more processes than before,
        the additional processes take the random states of other processes.
        """
        state = checkpoint.state
        process = f"{PROCESS}-{self.engine.rank % state['processes']}"
        rng = load_file(checkpoint.folder / f"{process}.safetensors")
        restore_global_rng_state(rng, checkpoint.document(f"{process}.json"))
        if self.engine.is_main:
            logger.warning(
                "Resumed from %s: %d %s are done.", checkpoint.folder, state["step"], unit
            )

    def _check_same_run(self, checkpoint: Checkpoint, *, anyway: bool) -> bool:
        different = self.fingerprint.differences(checkpoint.state["identity"])
        if not different:
            return True
        differences = "; ".join(different)
        if not anyway:
            raise TrainingError(
                f"The checkpoint '{checkpoint.folder}' was {differences}. The resumed run would "
                "mix the old and the new settings. Resume with the settings and models of the "
                "checkpoint, start a new run in another output_dir, or set --resume_anyway "
                "(resume_anyway=True)."
            )
        if self.engine.is_main:
            logger.warning("Resuming anyway: '%s' was %s.", checkpoint.folder, differences)
        return False

    def _restore_optimizer_states(self, checkpoint: Checkpoint) -> None:
        kept, saved = checkpoint.state["kept"], checkpoint.tensors(OPTIMIZER)
        asked = set()

        def state_of(name: str) -> dict[str, Tensor]:
            asked.add(name)
            return {key: saved[f"{name}/{key}"] for key in kept.get(name, ())}

        self.engine.load_optimizer_states(self.module, self.optimizer, state_of)
        if strange := asked ^ kept.keys():
            raise TrainingError(
                f"The optimizer state in the checkpoint '{checkpoint.folder}' is for other "
                f"parameters than in this run, for example {min(strange)}. Moments would start "
                "from zero. Resume with the models that wrote the checkpoint, or start a new run "
                "in another output_dir."
            )


def full_weights(engine: Engine, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return unsharded copies of parameters; an empty dict outside the main process."""
    full = engine.full_state_dict(nn.ParameterList(parameters.values()))
    return dict(zip(parameters, full.values(), strict=True)) if full is not None else {}


@contextmanager
def explained_form(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise a TrainingError if a file of the checkpoint does not have the expected form."""
    try:
        yield
    except PPOError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OSError, SafetensorError) as e:
        raise TrainingError(
            f"The checkpoint '{checkpoint.folder}' cannot be restored, because one of its "
            f"files is missing or has an unexpected format: {type(e).__name__}: {e}. Resume from "
            "an earlier checkpoint, or with the version that wrote this one."
        ) from e


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU."""
    return tensor.detach().to("cpu", copy=True)
