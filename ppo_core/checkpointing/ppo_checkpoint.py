"""Save and resume PPO: a checkpoint has everything that the next update depends on."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from ppo_core.checkpointing.fingerprint import PRETRAIN_DATASET, Fingerprint
from ppo_core.checkpointing.folders import STATE
from ppo_core.checkpointing.read_checkpoint import Checkpoint
from ppo_core.checkpointing.training_state import (
    TrainingState,
    copied,
    explained_form,
    full_weights,
)
from ppo_core.checkpointing.write_checkpoint import Part
from ppo_core.data.model_files import save_tokenizer
from ppo_core.errors import TrainingError
from ppo_core.models.files.adapter_weights import adapter_parameters, save_adapter
from ppo_core.models.loading import load_model
from ppo_core.ppo.optimizer import critic_parameters
from ppo_core.ppo.run_state import RunContext

CRITIC, AVERAGE, REFERENCE = "critic", "average", "reference"
"""Names of tensor groups in a checkpoint; the run state adds further groups."""


@dataclass(frozen=True, kw_only=True)
class CheckpointContents(RunContext):
    """Collects the state of one run for a checkpoint, and restores the state.

    All processes must call the methods.
    """

    fingerprint: Fingerprint

    @property
    def step(self) -> int:
        """Number of updates that are done."""
        return self.run.updates

    def part(self) -> Part:
        """Return a copy of the files that this process writes."""
        groups, documents, entries = self._training.part()
        weights = self._full_weights()
        write_policy = self._policy_writer()
        if not self.engine.is_main:
            return Part(groups=groups, documents=documents)
        run_groups, state = self._state()
        return Part(
            groups=groups | weights | run_groups,
            documents=documents | {STATE: json.dumps(entries | state)},
            write_policy=write_policy,
        )

    @property
    def _training(self) -> TrainingState:
        train_state, fingerprint = self.train_state, self.fingerprint
        if train_state.pretraining is not None:
            texts = {PRETRAIN_DATASET: train_state.pretraining.digest}
            fingerprint = replace(fingerprint, settings=fingerprint.settings | texts)
        return TrainingState(
            engine=self.engine,
            module=train_state.module,
            optimizer=train_state.optimizer,
            scheduler=train_state.scheduler,
            fingerprint=fingerprint,
        )

    def _full_weights(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the weights of the critic, the refreshed reference and the averaged policy.

        The weights are complete only in the main process.
        """
        engine, reference = self.engine, self.models.reference
        weights: dict[str, Mapping[str, Tensor]] = {}
        if self.models.critic is not None:
            weights[CRITIC] = full_weights(engine, self._critic())
        if self.config.reference_refresh_updates:
            weights[REFERENCE] = full_weights(engine, dict(reference.named_parameters()))
        if self.average is not None:
            weights[AVERAGE] = {k: copied(mean) for k, mean in self.average.tensors().items()}
        return weights

    def _policy_writer(self) -> Callable[[Path], None]:
        """Return a function that writes the policy, or a PeftModel's adapter, into a folder."""
        adapted, model = self.models.adapted, self.models.policy.model
        if adapted is None:
            weights = self.engine.full_state_dict(model)
        else:
            of_adapter = set(map(id, adapter_parameters(adapted).values()))
            named = {n: p for n, p in adapted.named_parameters() if id(p) in of_adapter}
            weights = full_weights(self.engine, named)

        def write(folder: Path) -> None:
            if adapted is None:
                model.save_pretrained(folder, state_dict=weights)
            else:
                save_adapter(adapted, folder, weights=weights)
            save_tokenizer(self.tokenizer, folder)

        return write

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tensors of the run state, and PPO's entries of trainer_state.json."""
        train_state = self.train_state
        groups, run = self.run.as_checkpoint()
        return groups, {
            "step": self.run.updates,
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
            TrainingError: the checkpoint belongs to another run or has other models, or one of its
                files does not have the expected form.
        """
        with explained_form(checkpoint):
            self._restore(checkpoint, anyway=anyway)

    def _restore(self, checkpoint: Checkpoint, *, anyway: bool) -> None:
        state, train_state = checkpoint.state, self.train_state
        training = self._training
        is_same = training.begin_restoring(checkpoint, anyway=anyway)
        self.engine.load_weights(train_state.module, self._weights(checkpoint).get)
        if self.config.reference_refresh_updates:
            reference = checkpoint.tensors(REFERENCE)
            self.engine.load_weights(self.models.reference, reference.get)
        if self.average is not None:
            self.average.load(checkpoint.tensors(AVERAGE))
        training.restore_optimizer(checkpoint, is_same=is_same)
        train_state.skipped_steps = state["skipped_steps"]
        train_state.skipped_in_a_row = state["skipped_in_a_row"]
        if train_state.pretraining is not None and state["pretraining"] is not None:
            train_state.pretraining.load_state_dict(state["pretraining"])
        self.run.restore({g: dict(checkpoint.tensors(g)) for g in state["groups"]}, state["run"])
        self.reporter.load_state_dict(state["reporter"])
        training.finish_restoring(checkpoint, "updates")

    def _weights(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        """Return a checkpoint's policy and critic weights, by their names in the trained module."""
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
