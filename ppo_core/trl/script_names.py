"""Names of TRL's trainer that scripts and callbacks use: arguments, attributes and methods."""

import time
from collections.abc import Callable, Mapping
from functools import wraps
from math import ceil
from pathlib import Path
from typing import Any, ParamSpec

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
from transformers.trainer_callback import CallbackHandler

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError
from ppo_core.ppo.schedule import Schedule
from ppo_core.reporting.callbacks import CallbackOrType
from ppo_core.reporting.metrics import Metrics
from ppo_core.training.trainer import Trainer

Parameters = ParamSpec("Parameters")

OLDER_NAMES = {
    "config": "args",
    "tokenizer": "processing_class",
    "policy": "model",
    "ref_policy": "ref_model",
}
"""Name of an argument of the trainer in TRL 0.9 to 0.12 -> name since then."""

STATE_FILE = "trainer_state.json"


def with_older_names(
    function: Callable[Parameters, None], names: Mapping[str, str] = OLDER_NAMES
) -> Callable[Parameters, None]:
    """Make a function accept keyword arguments also under their older names.

    Raises:
        ConfigError: an argument is given under both names.
    """

    @wraps(function)
    def renamed(*args: Parameters.args, **given: Parameters.kwargs) -> None:
        for name in names.keys() & given.keys():
            if names[name] in given:
                raise ConfigError(
                    f"{name} and {names[name]} are two names of one argument. Pass only "
                    f"{names[name]}."
                )
            given[names[name]] = given.pop(name)
        function(*args, **given)

    return renamed


def add_computed(
    args: PPOConfig, of_callbacks: TrainingArguments, schedule: Schedule, engine: Engine
) -> None:
    """Add to a trainer's settings the attributes that TRL's trainer computes and scripts read.

    Only `total_episodes` is a setting. The other attributes are read only by scripts, and
    `dataclasses.replace` leaves them out. `of_callbacks` are the settings that callbacks get. An
    attribute that is already a property of `of_callbacks` stays unchanged there.
    """
    local = ceil(schedule.batch_size / engine.num_processes)
    computed = {
        "total_episodes": schedule.total_episodes,
        "num_total_batches": schedule.num_updates,
        "world_size": engine.num_processes,
        "micro_batch_size": args.per_device_train_batch_size * engine.num_processes,
        "local_batch_size": local,
        "local_mini_batch_size": ceil(local / args.num_mini_batches),
        "process_index": engine.accelerator.process_index,
        "local_process_index": engine.accelerator.local_process_index,
        "device": engine.device,
        "n_gpu": int(engine.device.type == "cuda"),
        "train_batch_size": args.per_device_train_batch_size,
        "eval_batch_size": args.per_device_eval_batch_size,
    }
    for name, value in computed.items():
        # A trainer's settings are frozen: a plain assignment raises an error.
        object.__setattr__(args, name, value)
        if not isinstance(getattr(type(of_callbacks), name, None), property):
            setattr(of_callbacks, name, value)


class PolicyAndValue(nn.Module):
    """Policy and value model of a run; calls and all other attributes go to the policy."""

    def __init__(self, policy: nn.Module, value_model: nn.Module | None) -> None:
        """Take the models, which may share parameters; without a critic, `value_model` is None."""
        super().__init__()
        self.policy = policy
        self.value_model = value_model

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the policy."""
        return self.policy(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the policy."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.policy, name)


class ScriptNames(Trainer):
    """Our trainer with the attributes and methods of TRL's trainer."""

    model: PolicyAndValue
    """Policy and value model, as `model.policy` and `model.value_model`."""

    ref_model: nn.Module | None
    """The reference; None if it shares the policy's base model, with its own adapter or none."""

    reward_model: Any
    """The rewards as the script passed them."""

    train_dataset: Any
    eval_dataset: Any

    @property
    def args(self) -> PPOConfig:
        """The settings, with precision and batch sizes filled in."""
        return self.config

    @property
    def policy_model(self) -> nn.Module:
        """The policy as a model of transformers or PEFT."""
        return self.model.policy

    @property
    def value_model(self) -> nn.Module | None:
        """The value model that the script passed; otherwise the critic, or None without one."""
        return self.model.value_model

    @property
    def model_wrapped(self) -> PolicyAndValue:
        """The same as `model`."""
        return self.model

    @property
    def processing_class(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        return self.tokenizer

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of policy and critic."""
        return self._train_state.optimizer

    @property
    def lr_scheduler(self) -> LRScheduler:
        """Scheduler of the learning rate, advanced once per optimizer step."""
        return self._train_state.scheduler

    @property
    def accelerator(self) -> Any:
        """Accelerate's Accelerator with device, process_index, is_main_process, ..."""
        return self.engine.accelerator

    @property
    def state(self) -> TrainerState:
        """Transformers' state of the run: steps, and the history of logged metrics."""
        return self._reporter.state

    @property
    def control(self) -> TrainerControl:
        """Transformers' flags with which callbacks stop the run or request logs and checkpoints."""
        return self._reporter.control

    @property
    def callback_handler(self) -> CallbackHandler:
        """Transformers' list of callbacks."""
        return self._reporter.handler

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether DeepSpeed trains the policy."""
        return self.engine.is_deepspeed

    @property
    def is_fsdp_enabled(self) -> bool:
        """Always False: weights are saved whole under FSDP, so scripts need not convert them."""
        return False

    def is_world_process_zero(self) -> bool:
        """Return whether this is the process that writes files and logs."""
        return self.engine.is_main

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process of its machine."""
        is_first: bool = self.accelerator.is_local_main_process
        return is_first

    def add_callback(self, callback: CallbackOrType) -> None:
        """Add a callback of transformers; if `callback` is a class, add an instance of it."""
        self._reporter.add_callback(callback)

    def pop_callback(self, callback: CallbackOrType) -> TrainerCallback | None:
        """Remove and return a callback, or the first of a class; return None if there is none."""
        return self._reporter.pop_callback(callback)

    def remove_callback(self, callback: CallbackOrType) -> None:
        """Remove a callback; if `callback` is a class, remove its first instance."""
        self._reporter.remove_callback(callback)

    def log(self, logs: Metrics, start_time: float | None = None) -> None:
        """Add metrics to the log history, and send them to callbacks and trackers.

        With `start_time` (from `time.time()`), the metric "runtime" has the seconds since then.
        """
        runtime = {} if start_time is None else {"runtime": time.time() - start_time}
        self._reporter.log(logs | runtime)

    def save_state(self) -> None:
        """Write `state` into `output_dir`, as trainer_state.json."""
        folder = Path(self._reporter.args.output_dir or ".")
        if self.engine.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(folder / STATE_FILE))
