"""The contents of a run's checkpoint: everything that the next update depends on."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ppo_core.checkpointing.files import STATE, Checkpoint, Part
from ppo_core.checkpointing.fingerprint import Fingerprint
from ppo_core.checkpointing.optimizer_options import (
    check_optimizer_fits,
    optimizer_options,
    restore_options,
    set_schedule_step,
)
from ppo_core.data.model_files import save_tokenizer
from ppo_core.errors import PPOError, TrainingError
from ppo_core.models.files.adapter_weights import adapter_parameters, save_adapter
from ppo_core.models.loading import load_model
from ppo_core.ppo.optimizer import critic_parameters
from ppo_core.ppo.random_state import global_rng_state, restore_global_rng_state
from ppo_core.ppo.run_state import RunContext

CRITIC, OPTIMIZER, PROCESS, AVERAGE, REFERENCE = (
    "critic optimizer process average reference".split()
)
"""Names of tensor groups in a checkpoint; the run state adds further groups."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointContents(RunContext):
    """Collects the state of one run for a checkpoint, and restores it; all processes must call.

    Tensors are written unsharded, by parameter name, so a checkpoint can be resumed with any
    number of processes and any sharding.
    """

    fingerprint: Fingerprint

    def part(self) -> Part:
        """Return a copy of the files that this process writes."""
        rng, rng_numbers = global_rng_state()
        process = f"{PROCESS}-{self.engine.rank}"
        optimizer, kept = self._optimizer_share()
        groups: dict[str, Mapping[str, Tensor]] = {
            f"{OPTIMIZER}-{self.engine.rank}": optimizer,
            process: rng,
        }
        documents = {f"{process}.json": json.dumps(rng_numbers)}
        weights = self._full_weights()
        write_policy = self._policy_writer()
        if not self.engine.is_main:
            return Part(groups=groups, documents=documents)
        run_groups, state = self._state(kept)
        return Part(
            groups=groups | weights | run_groups,
            documents=documents | {STATE: json.dumps(state)},
            write_policy=write_policy,
        )

    def _optimizer_share(self) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
        """Return the optimizer states that this process writes, and each parameter's state keys."""
        loads = [0] * self.engine.num_processes
        share: dict[str, Tensor] = {}
        kept = {}
        train_state = self.train_state
        for name, state in self.engine.optimizer_states(train_state.module, train_state.optimizer):
            kept[name] = list(state)
            rank = loads.index(min(loads))
            loads[rank] += sum(tensor.nbytes for tensor in state.values())
            if rank == self.engine.rank:
                share |= {f"{name}/{key}": _copy(tensor) for key, tensor in state.items()}
        return share, kept

    def _full_weights(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the weights of critic, refreshed reference and average, in the main process."""
        weights: dict[str, Mapping[str, Tensor]] = {CRITIC: self._full(self._critic())}
        if self.config.reference_refresh_updates:
            weights[REFERENCE] = self._full(dict(self.models.reference.named_parameters()))
        if self.average is not None:
            weights[AVERAGE] = {k: _copy(mean) for k, mean in self.average.tensors().items()}
        return weights

    def _full(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return unsharded copies of parameters; an empty dict outside the main process."""
        full = self.engine.full_state_dict(nn.ParameterList(parameters.values()))
        return dict(zip(parameters, full.values(), strict=True)) if full is not None else {}

    def _policy_writer(self) -> Callable[[Path], None]:
        """Return a function that writes the policy into a folder, with an unmerged adapter."""
        adapted, model = self.models.adapted, self.models.policy.model
        if adapted is None:
            weights = self.engine.full_state_dict(model)
        else:
            of_adapter = set(map(id, adapter_parameters(adapted).values()))
            named = {n: p for n, p in adapted.named_parameters() if id(p) in of_adapter}
            weights = self._full(named)

        def write(folder: Path) -> None:
            if adapted is None:
                model.save_pretrained(folder, state_dict=weights)
            else:
                save_adapter(adapted, folder, weights=weights)
            save_tokenizer(self.tokenizer, folder)

        return write

    def _state(self, kept: dict[str, list[str]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tensors of the run state, and the content of trainer_state.json."""
        train_state = self.train_state
        groups, run = self.run.as_checkpoint()
        return groups, {
            "step": self.run.updates,
            "processes": self.engine.num_processes,
            "identity": self.fingerprint.as_json(),
            "optimizer": optimizer_options(train_state.optimizer),
            "kept": kept,
            "scheduler": train_state.scheduler.state_dict(),
            "skipped_steps": train_state.skipped_steps,
            "skipped_in_a_row": train_state.skipped_in_a_row,
            "pretraining": train_state.pretraining and train_state.pretraining.state_dict(),
            "groups": list(groups),
            "run": run,
            "reporter": self.reporter.state_dict(),
        }

    def _names(self) -> dict[int, str]:
        """Return the name of each parameter of the trained module, by the parameter's id."""
        module = self.engine.unwrap(self.train_state.module)
        return {id(parameter): name for name, parameter in module.named_parameters()}

    def _critic(self) -> dict[str, nn.Parameter]:
        names = self._names()
        own = critic_parameters(self.models.policy, self.models.critic)
        return {names[id(parameter)]: parameter for parameter in own.values()}

    # --- Resuming ---

    def restore(self, checkpoint: Checkpoint, *, anyway: bool) -> None:
        """Continue from the state in a checkpoint.

        With `anyway`, accept a checkpoint of another run and log the differences as a warning.

        Raises:
            TrainingError: the checkpoint belongs to another run, has other models, or a file of it
                has another form.
        """
        try:
            self._restore(checkpoint, anyway=anyway)
        except PPOError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OSError, SafetensorError) as e:
            raise TrainingError(
                f"The checkpoint '{checkpoint.folder}' cannot be restored, because a file of it "
                f"has another form than this version writes: {type(e).__name__}: {e}. Resume from "
                "an earlier checkpoint, or with the version that wrote this one."
            ) from e

    def _restore(self, checkpoint: Checkpoint, *, anyway: bool) -> None:
        state, train_state = checkpoint.state, self.train_state
        is_same = self._check_same_run(checkpoint, anyway=anyway)
        check_optimizer_fits(train_state.optimizer, state["optimizer"])
        # Drop gradients that an earlier error in this trainer may have left.
        self.engine.discard(train_state.module, train_state.optimizer)
        self.engine.load_weights(train_state.module, self._weights(checkpoint).get)
        if self.config.reference_refresh_updates:
            reference = checkpoint.tensors(REFERENCE)
            self.engine.load_weights(self.models.reference, reference.get)
        if self.average is not None:
            self.average.load(checkpoint.tensors(AVERAGE))
        self._restore_optimizer(checkpoint)
        if is_same or not isinstance(train_state.scheduler, LambdaLR):
            restore_options(train_state.optimizer, state["optimizer"])
            train_state.scheduler.load_state_dict(state["scheduler"])
        else:  # the settings differ, so take rates and options from the new settings
            set_schedule_step(train_state.scheduler, state["scheduler"]["last_epoch"])
        train_state.skipped_steps = state["skipped_steps"]
        train_state.skipped_in_a_row = state["skipped_in_a_row"]
        if train_state.pretraining is not None and state["pretraining"] is not None:
            train_state.pretraining.load_state_dict(state["pretraining"])
        self.run.restore({g: dict(checkpoint.tensors(g)) for g in state["groups"]}, state["run"])
        self.reporter.load_state_dict(state["reporter"])
        process = f"{PROCESS}-{self.engine.rank % state['processes']}"
        rng = load_file(checkpoint.folder / f"{process}.safetensors")
        restore_global_rng_state(rng, checkpoint.document(f"{process}.json"))
        if self.engine.is_main:
            logger.warning(
                "Resumed from %s: %d updates are done.", checkpoint.folder, state["step"]
            )

    def _check_same_run(self, checkpoint: Checkpoint, *, anyway: bool) -> bool:
        """Return whether settings, prompts and models match the checkpoint's.

        Raises:
            TrainingError: they differ, and `anyway` is off.
        """
        different = self.fingerprint.differences(checkpoint.state["identity"])
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
        if self.engine.is_main:
            logger.warning("Resuming anyway: '%s' was %s.", checkpoint.folder, differences)
        return False

    def _weights(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        """Return a checkpoint's policy and critic weights, by name in the trained module."""
        names, adapted, model = self._names(), self.models.adapted, self.models.policy.model
        critic = checkpoint.tensors(CRITIC)
        if adapted is not None:
            ours: Mapping[str, nn.Parameter] = adapter_parameters(adapted)
            saved = load_file(checkpoint.folder / "adapter_model.safetensors")
        else:
            ours = dict(model.named_parameters())
            loaded = load_model(type(model), checkpoint.folder, {"dtype": model.dtype})
            saved = loaded.state_dict()
        strange = (ours.keys() - saved.keys()) | (self._critic().keys() ^ critic.keys())
        if strange:
            raise TrainingError(
                f"The policy or critic in the checkpoint '{checkpoint.folder}' has other "
                f"parameters than in this run, for example {min(strange)}. Resume with the models "
                "that wrote the checkpoint."
            )
        policy = {names[id(parameter)]: saved[name] for name, parameter in ours.items()}
        return policy | dict(critic)

    def _restore_optimizer(self, checkpoint: Checkpoint) -> None:
        kept, saved = checkpoint.state["kept"], checkpoint.tensors(OPTIMIZER)
        asked = set()

        def state_of(name: str) -> dict[str, Tensor]:
            asked.add(name)
            return {key: saved[f"{name}/{key}"] for key in kept.get(name, ())}

        train_state = self.train_state
        self.engine.load_optimizer_states(train_state.module, train_state.optimizer, state_of)
        if strange := asked ^ kept.keys():
            raise TrainingError(
                f"The optimizer state in the checkpoint '{checkpoint.folder}' is for other "
                f"parameters than in this run, for example {min(strange)}. Moments would start "
                "from zero. Resume with the models that wrote the checkpoint, or start a new run "
                "from the checkpoint's policy."
            )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
