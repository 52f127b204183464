"""What a run writes and reads: the policy, its card, and checkpoints."""

import logging
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ppo_core.adapters import load_adapter_weights, merged_copy, save_adapter
from ppo_core.checkpoint import (
    latest_checkpoint,
    read_checkpoint,
    remove_old_checkpoints,
    save_checkpoint,
)
from ppo_core.config import PPOConfig
from ppo_core.ema import WeightAverage
from ppo_core.engine import Engine
from ppo_core.errors import ConfigError, TrainingError
from ppo_core.model_card import push_folder, write_model_card
from ppo_core.optimisation import critic_parameters
from ppo_core.parts import Parts
from ppo_core.quantised import is_quantised
from ppo_core.reporting import Reporter
from ppo_core.run_state import RunState
from ppo_core.schedule import Schedule
from ppo_core.training_state import (
    flatten_optimizer,
    global_rng_state,
    restore_global_rng_state,
    restore_optimizer,
)
from ppo_core.update import Trainee

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER = "adapter"
"""Folder of the adapter beside the merged policy."""

AROUND = re.compile(
    "output_dir|exp_name|run_name|report_to|disable_tqdm|dataset_num_proc|num_sample_generations|"
    "local_rollout_forward_batch_size|per_device_eval_batch_size|(logging|eval|save|hub|warn)_.*|"
    "push_to_hub|.*_model_path|max_skipped_steps"
)
"""Settings that do not decide what a run computes: they may differ where it is resumed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Writes and reads the files of one run; all processes call, the main one writes."""

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    parts: Parts
    engine: Engine
    trainee: Trainee
    run: RunState
    reporter: Reporter
    average: WeightAverage | None
    schedule: Schedule
    prompts_digest: str
    """Of the prompts' tokens: a checkpoint belongs to them."""

    @property
    def trained_model(self) -> nn.Module:
        """The policy as transformers or peft knows it."""
        return self.parts.adapted or self.parts.policy.model

    # --- The policy ---

    def save_policy(self, folder: Path) -> None:
        """Policy and tokenizer, with the running mean of the weights if there is one."""
        averaged = self.average.swapped_in() if self.average else nullcontext()
        with averaged:
            self._write_policy(folder)

    def _write_policy(self, folder: Path) -> None:
        adapted, model = self.parts.adapted, self.parts.policy.model
        if adapted is None:
            weights = self.engine.whole_state_dict(model)
            if self.engine.is_main:
                model.save_pretrained(folder, state_dict=weights)
        else:
            with self.engine.gathered(self.trainee.module):
                if self.engine.is_main:
                    _write_adapted(adapted, folder)
        if self.engine.is_main:
            self.tokenizer.save_pretrained(folder)

    def write_card(self, *, model_name: str | None = None, **details: Any) -> None:
        """README.md with the settings and the last metrics."""
        history = self.reporter.state.log_history
        if self.engine.is_main:
            write_model_card(
                Path(self.config.output_dir),
                config=self.config,
                base_model=getattr(self.parts.policy.model.config, "_name_or_path", ""),
                metrics=history[-1] if history else {},
                model_name=model_name,
                **details,
            )

    def push(self, commit_message: str, **details: Any) -> str | None:
        """Upload `output_dir` without its checkpoints, from the main process."""
        self.write_card(**details)
        if not self.engine.is_main:
            return None
        folder = Path(self.config.output_dir)
        return push_folder(
            folder,
            repo_id=self.config.hub_model_id or folder.resolve().name,
            token=self.config.hub_token,
            private=self.config.hub_private_repo,
            commit_message=commit_message,
        )

    # --- Checkpoints ---

    def start_anew(self) -> None:
        """See that checkpoints can be written, and that none of another run is in their way.

        Raises:
            ConfigError: `output_dir` cannot be made, or holds an earlier run's checkpoints.
        """
        folder = Path(self.config.output_dir)
        if self.config.save_strategy == "no" or self.engine.is_deepspeed:
            return
        if earlier := latest_checkpoint(folder):
            raise ConfigError(
                f"'{earlier}' is of an earlier run: this one's checkpoints would mix with it, and "
                "resuming would take the wrong one. Resume with resume_from_checkpoint, choose "
                "another output_dir, or remove the old checkpoints."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output_dir='{folder}' cannot be made: {error}. No checkpoint could be written "
                "there. Choose another."
            ) from error

    def save_checkpoint(self) -> None:
        """Everything the next update depends on, in `output_dir/checkpoint-<updates>`."""
        if self.engine.is_deepspeed:
            if self.engine.is_main:
                logger.warning("No checkpoint: the shards of DeepSpeed's optimizer are not saved.")
            return
        failure: Exception | None = None
        if self.engine.is_main:
            try:
                self._write_checkpoint()
            except (TrainingError, OSError, ValueError) as error:
                failure = error
        # The others would wait for a process that has ended.
        if self.engine.any(failure is not None):
            raise failure or TrainingError("The main process could not write its checkpoint.")

    def _write_checkpoint(self) -> None:
        tensors, state = self._as_checkpoint()
        folder = Path(self.config.output_dir) / f"checkpoint-{self.run.updates}"
        save_checkpoint(folder, tensors=tensors, state=state, write_policy=self._write_trained)
        remove_old_checkpoints(self.config.output_dir, self.config.save_total_limit)

    def resume(self, folder: Path) -> None:
        """Go on where a checkpoint was written.

        Raises:
            ConfigError: under DeepSpeed, whose shards are not read.
            TrainingError: the checkpoint is damaged, or belongs to another run.
        """
        if self.engine.is_deepspeed:
            raise ConfigError(
                f"The checkpoint '{folder}' cannot be resumed under DeepSpeed, whose optimizer "
                "shards are not read. Start without DeepSpeed."
            )
        checkpoint = read_checkpoint(folder)
        self._check_same_run(folder, checkpoint.state["settings"])
        tensors, state = checkpoint.tensors, checkpoint.state
        self.engine.discard(self.trainee.module, self.trainee.optimizer)
        self._read_trained(folder)
        _load_parameters(self._of_critic(), tensors["critic"])
        if "reference" in tensors:
            self.parts.reference.load_state_dict(tensors["reference"], strict=False)
        if self.average is not None:
            self.average.load(tensors["average"])
        restore_optimizer(self.trainee.optimizer, tensors["optimizer"], state["optimizer"])
        self.trainee.scheduler.load_state_dict(state["scheduler"])
        self.trainee.skipped_steps = state["skipped_steps"]
        self.trainee.skipped_in_a_row = state["skipped_in_a_row"]
        if self.trainee.pretraining is not None:
            self.trainee.pretraining.load_state_dict(state["pretraining"])
        self.run.restore(tensors["generators"], state["run"])
        self.reporter.load_state_dict(state["reporter"])
        restore_global_rng_state(tensors["global_rng"], state["global_rng"])
        logger.warning("Resumed from %s: %d updates are done.", folder, self.run.updates)

    def _as_checkpoint(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        trainee = self.trainee
        generators, run = self.run.as_checkpoint()
        rng_tensors, rng = global_rng_state()
        optimizer_tensors, optimizer = flatten_optimizer(trainee.optimizer)
        tensors = {
            "critic": self._of_critic(),
            "optimizer": optimizer_tensors,
            "generators": generators,
            "global_rng": rng_tensors,
        }
        if self.average is not None:
            tensors["average"] = self.average.tensors()
        if self.config.reference_refresh_updates:
            tensors["reference"] = dict(self.parts.reference.named_parameters())
        return tensors, {
            "settings": self._settings(),
            "optimizer": optimizer,
            "scheduler": trainee.scheduler.state_dict(),
            "skipped_steps": trainee.skipped_steps,
            "skipped_in_a_row": trainee.skipped_in_a_row,
            "pretraining": trainee.pretraining and trainee.pretraining.state_dict(),
            "run": run,
            "reporter": self.reporter.state_dict(),
            "global_rng": rng,
        }

    def _of_critic(self) -> dict[str, Tensor]:
        parameters = critic_parameters(self.parts.policy, self.parts.critic)
        return {name: parameter.detach() for name, parameter in parameters.items()}

    def _write_trained(self, folder: Path) -> None:
        """The policy as it is trained: an adapter stays one."""
        if self.parts.adapted is None:
            self.parts.policy.model.save_pretrained(folder)
        else:
            save_adapter(self.parts.adapted, folder)
        self.tokenizer.save_pretrained(folder)

    def _read_trained(self, folder: Path) -> None:
        if self.parts.adapted is not None:
            load_adapter_weights(self.parts.adapted, folder)
            return
        model = self.parts.policy.model
        saved = type(model).from_pretrained(folder, dtype=model.dtype)
        model.load_state_dict(saved.state_dict())

    def _settings(self) -> dict[str, Any]:
        """The settings that decide what a run computes."""
        settings = {k: v for k, v in vars(self.config).items() if not AROUND.fullmatch(k)}
        return settings | vars(self.schedule) | {"prompts": self.prompts_digest}

    def _check_same_run(self, folder: Path, settings: dict[str, Any]) -> None:
        here = self._settings()
        different = [name for name in here if here[name] != settings.get(name)]
        if different:
            name = different[0]
            raise TrainingError(
                f"The checkpoint '{folder}' was written with {name}={settings.get(name)!r}, and "
                f"now it is {here[name]!r}: what follows would be neither run. Resume with the "
                "settings of the checkpoint, or start a new run from its policy."
            )


def _write_adapted(model: "PeftModel", folder: Path) -> None:
    """The adapter, and the policy it makes, unless merging would round it to a few bits."""
    save_adapter(model, folder / ADAPTER)
    if is_quantised(model):
        logger.warning("The base is quantised: '%s' holds the adapter alone.", folder / ADAPTER)
    else:
        merged_copy(model).save_pretrained(folder)


def _load_parameters(parameters: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    if parameters.keys() != saved.keys():
        raise TrainingError(
            f"The critic of the checkpoint has other parameters, for example "
            f"{min(parameters.keys() ^ saved.keys())}. Resume with the models that wrote it."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
