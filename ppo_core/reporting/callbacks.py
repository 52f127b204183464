"""Call transformers' callbacks at the events of a run."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.reporting.metrics import Metrics
from ppo_core.reporting.metrics_file import NEWEST_SAMPLES_FILE, MetricsFile, read_metrics
from ppo_core.reporting.sample_table import Completions, write_completions

CallbackOrType: TypeAlias = TrainerCallback | type[TrainerCallback]

# Settings that transformers must not get: PPOTrainer itself uploads to the hub. transformers has
# another name for gradient_checkpointing. With `deepspeed`, transformers would change how models
# are built.
_NOT_HANDED_ON = {"push_to_hub", "gradient_checkpointing", "deepspeed"}


class PPOArguments(TrainingArguments):
    """`TrainingArguments` of a PPO run, with all settings of the PPOConfig as attributes."""

    ppo_settings: dict[str, Any]
    """Original settings of the PPOConfig, without hub_token."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of transformers and PPOConfig, for integrations to log."""
        logged = super().to_dict() | self.ppo_settings  # type: ignore[no-untyped-call]
        return {name: value for name, value in logged.items() if name != "hub_token"}


def training_arguments(config: PPOConfig, num_updates: int) -> PPOArguments:
    """Return the settings as transformers' arguments; a step is one of `num_updates` PPO updates.

    Call this function after the process group exists, so that transformers uses the group.

    Raises:
        ConfigError: transformers rejects a value; the message contains transformers' reason.
    """
    settings = asdict(config)
    del settings["hub_token"]
    theirs = {entry.name for entry in fields(TrainingArguments)}
    shared = {name: settings[name] for name in settings.keys() & theirs - _NOT_HANDED_ON}
    shared |= {
        "max_steps": num_updates,
        # HfArgumentParser sets report_to to None if the flag is missing.
        "report_to": config.report_to or "none",
        "run_name": config.run_name or config.exp_name,
        "activation_checkpointing": config.gradient_checkpointing,
        # transformers reads a value below 1 as a fraction of the run.
        "warmup_steps": config.warmup_steps or config.warmup_ratio,
        "use_cpu": config.use_cpu or not torch.cuda.is_available(),
        # Without this setting, transformers would reset the engine's process group.
        "accelerator_config": {"use_configured_state": True},
    }
    try:
        arguments = PPOArguments(**shared)
    except ValueError as error:
        raise ConfigError(f"transformers rejects the settings of the run: {error}") from error
    arguments.ppo_settings = settings
    for name in settings.keys() - theirs | {"deepspeed"}:
        setattr(arguments, name, settings[name])
    return arguments


class Reporter:
    """Calls transformers' callbacks at the events of transformers' Trainer, in every process.

    One step of a callback is one PPO update. `should_evaluate`, `should_save` and `should_stop`
    are decisions of this process only, so processes must agree before acting on a decision.
    """

    def __init__(
        self,
        config: PPOConfig,
        *,
        callbacks: Sequence[CallbackOrType],
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        num_updates: int,
        is_main: bool,
    ) -> None:
        """Create the integrations of `report_to`, add `callbacks`, and call on_init_end.

        Raises:
            ConfigError: `report_to` names an unknown integration, or one whose package is not
                installed.
        """
        self.args = training_arguments(config, num_updates)
        self.state = TrainerState(
            max_steps=num_updates,
            num_train_epochs=math.ceil(config.num_train_epochs),
            train_batch_size=config.per_device_train_batch_size,
            is_local_process_zero=self.args.local_process_index == 0,
            is_world_process_zero=is_main,
        )
        self.state.compute_steps(self.args, num_updates)
        self.state.episode = 0  # type: ignore[attr-defined] # as in TRL
        # A run without checkpoints must not create output_dir.
        kept = is_main and config.save_strategy != "no"
        self._metrics_file = MetricsFile(Path(config.output_dir)) if kept else None
        self.control = TrainerControl()
        self.handler = CallbackHandler(
            [DefaultFlowCallback(), *_integrations(list(self.args.report_to or ())), *callbacks],
            model,
            tokenizer,
            optimizer,
            scheduler,
        )
        self._call("on_init_end")

    @property
    def callbacks(self) -> list[TrainerCallback]:
        """Callbacks in the order of their calls."""
        return self.handler.callbacks

    @property
    def should_evaluate(self) -> bool:
        """Whether an evaluation is due; `evaluated` and `step_begin` reset the flag."""
        return self.control.should_evaluate

    @property
    def should_save(self) -> bool:
        """Whether a checkpoint is due; `saved` and `step_begin` reset the flag."""
        return self.control.should_save

    @property
    def should_stop(self) -> bool:
        """Whether the run is complete, or a callback has stopped it."""
        return self.control.should_training_stop

    @property
    def handles_checkpoints(self) -> bool:
        """Whether a callback has its own on_save, in which it may read the checkpoint."""
        return any(type(each).on_save is not TrainerCallback.on_save for each in self.callbacks)

    def begin(self) -> None:
        """Call on_train_begin; a resumed run calls `load_state_dict` before this method."""
        if self._metrics_file is not None:
            self._metrics_file.cut_back(self.state.global_step, self._logged_updates())
        self._call("on_train_begin")

    def step_begin(self) -> None:
        """Call on_step_begin before an update."""
        self._call("on_step_begin")

    def step_end(self, metrics: Metrics, *, epoch: float | None = None) -> None:
        """Append an update's metrics to the metrics file, call on_step_end, and log if due.

        `epoch` is the number of passes over the prompts, including a fraction.
        """
        self.state.global_step += 1
        self.state.episode = int(metrics.get("episode", 0))  # type: ignore[attr-defined]
        if self._metrics_file is not None:
            self._metrics_file.append(self.state.global_step, metrics)
        if epoch is not None:
            self.state.epoch = epoch
        self._call("on_step_end")
        if self.control.should_log:
            self.log(metrics)

    def show_samples(self, samples: Completions) -> None:
        """Write responses of the last update beside the metrics file, for a person who watches."""
        if self._metrics_file is not None:
            write_completions(samples, self._metrics_file.path.with_name(NEWEST_SAMPLES_FILE))

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the log history, and call on_log.

        Scalars of torch and NumPy become Python numbers.

        Raises:
            ConfigError: a value cannot be written as JSON, and checkpoints contain the history.
        """
        logs = {name: _as_json(name, value) for name, value in metrics.items()}
        logs["epoch"] = self.state.epoch
        self.state.log_history.append(logs | {"step": self.state.global_step})
        self._call("on_log", logs=logs)

    def evaluated(self, metrics: Metrics) -> None:
        """Call on_evaluate with an evaluation's metrics, after the caller passed them to `log`."""
        self._call("on_evaluate", metrics=metrics)

    def saved(self) -> None:
        """Call on_save after a checkpoint was written."""
        self._call("on_save")

    def end(self) -> None:
        """Call on_train_end."""
        self._call("on_train_end")

    def add_callback(self, callback: CallbackOrType) -> None:
        """Add a callback, given as an instance or as a class to instantiate."""
        self.handler.add_callback(callback)

    def pop_callback(self, callback: CallbackOrType) -> TrainerCallback | None:
        """Remove and return a callback, or the first of a class; return None if there is none."""
        return self.handler.pop_callback(callback)

    def remove_callback(self, callback: CallbackOrType) -> None:
        """Remove a callback, or the first callback of a class."""
        self.handler.remove_callback(callback)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, serializable as JSON."""
        stateful: list[TrainerCallback] = [
            each for each in self.callbacks if isinstance(each, ExportableState)
        ]
        return {
            "global_step": self.state.global_step,
            "epoch": self.state.epoch,
            "best_metric": self.state.best_metric,
            "best_global_step": self.state.best_global_step,
            "log_history": list(self.state.log_history),
            "stateful_callbacks": TrainerState(stateful_callbacks=stateful).stateful_callbacks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Each callback with a state is replaced by a new callback created from the state. If the
        callback of a state is missing in this run, a warning names the callback.
        """
        self.state.global_step = state["global_step"]
        self.state.epoch = state["epoch"]
        self.state.best_metric = state["best_metric"]
        self.state.best_global_step = state["best_global_step"]
        self.state.log_history = list(state["log_history"])
        for name, stored in state["stateful_callbacks"].items():
            self._restore(name, stored if isinstance(stored, list) else [stored])

    def updates(self) -> list[dict[str, Any]]:
        """Return the metrics of all updates, each with its number; [] without a metrics file."""
        return [] if self._metrics_file is None else read_metrics(self._metrics_file.path)

    def _logged_updates(self) -> dict[int, Metrics]:
        """Return the metrics of each update in the log history, without the evaluations."""
        return {
            int(entry["step"]): {
                name: value for name, value in entry.items() if name not in ("step", "epoch")
            }
            for entry in self.state.log_history
            if "objective/kl" in entry
        }

    def _restore(self, name: str, states: Sequence[dict[str, Any]]) -> None:
        places = [i for i, each in enumerate(self.callbacks) if type(each).__name__ == name]
        if len(places) < len(states):
            warnings.warn(
                f"The checkpoint holds {len(states)} state(s) of the callback {name}; this run has "
                f"{len(places)} callback(s) of this class. States without a callback are dropped. "
                "To restore them, pass the missing callbacks to the trainer.",
                stacklevel=3,
            )
        for place, state in zip(places, states, strict=False):
            kind: Any = type(self.callbacks[place])
            self.callbacks[place] = kind.from_state(state)

    def _call(self, event: str, **details: Any) -> None:
        call = getattr(self.handler, event)
        self.control = call(self.args, self.state, self.control, **details)


def check_integrations(report_to: str | Sequence[str] | None) -> None:
    """Raise if an integration of transformers is unknown, or its package is not installed.

    Raises:
        ConfigError: an integration is unknown, or its package is not installed.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if names == ["all"]:
        names = get_available_reporting_integrations()
    _integrations([name for name in names if name != "none"])


def _integrations(report_to: list[str]) -> list[TrainerCallback]:
    try:
        kinds = get_reporting_integration_callbacks(report_to)
    except ValueError as error:
        raise ConfigError(f"report_to={report_to!r}: {error}") from error
    return [_integration(name, kind) for name, kind in zip(report_to, kinds, strict=True)]


def _integration(name: str, kind: type[TrainerCallback]) -> TrainerCallback:
    try:
        return kind()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"report_to={name!r} cannot start: {error} To run without {name!r}, remove it from "
            "report_to."
        ) from error


def _as_json(name: str, value: Any) -> Any:
    """Return a logged value in the form in which checkpoints store it."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"The logged value {name}={value!r:.80} cannot be stored in a checkpoint: {error}. Log "
            "a number, a text, or a list of them."
        ) from error
    return value
