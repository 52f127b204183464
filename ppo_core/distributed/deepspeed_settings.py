"""Check and complete DeepSpeed's settings, and undo what DeepSpeed changes in a process."""

import json
import os
from pathlib import Path
from typing import Any

from accelerate.utils import DeepSpeedPlugin

from ppo_core.config.run_config import Sharding
from ppo_core.distributed.choose_sharding import KINDS, launched_by_accelerate, launched_processes
from ppo_core.errors import ConfigError

Settings = dict[str, Any]

_REFUSED = {
    "fp16.enabled": "the weights stay in fp32. To compute in bfloat16, set bf16=True",
    "bf16.enabled": "the weights would become bfloat16. Set bf16=True, which keeps the weights in "
    "fp32 and computes in bfloat16",
    "torch_autocast.enabled": "it would not cover sampling and scoring. Set bf16=True, which does",
    "amp.enabled": "to compute in bfloat16, set bf16=True",
    "optimizer": "the trainer makes the optimizer. Set learning_rate, weight_decay, adam_beta1, "
    "adam_beta2 and adam_epsilon",
    "scheduler": "the trainer makes the schedule. Set lr_scheduler_type and warmup_ratio",
    "gradient_clipping": "the trainer sets it. Set max_grad_norm",
    "managed_gradient_accumulation": "the trainer marks the last microbatch of a step. Remove it",
    "zero_force_ds_cpu_optimizer": "DeepSpeed's CPU Adam would have to be compiled, and its states "
    "do not fit a resumed run with another sharding. Remove it",
    "zero_optimization.compute_grad_norm": "the trainer needs the norm in each step. Remove it",
    "zero_optimization.offload_optimizer.device": "checkpoints could not contain the states. Set "
    "cpu or none",
    "zero_optimization.offload_param.device": "checkpoints could not contain the weights. Set cpu "
    "or none",
}

_OFFLOADS = (None, "none", "cpu")
_ACCEPTED = {
    "managed_gradient_accumulation": (None, True),
    "zero_optimization.compute_grad_norm": (None, True),
    "zero_optimization.offload_optimizer.device": _OFFLOADS,
    "zero_optimization.offload_param.device": _OFFLOADS,
}
"""Accepted values of some settings in `_REFUSED`; any other setting in `_REFUSED` must be absent,
False or 0."""


def make_plugin(
    path: str | None, sharding: Sharding | None = None, *, offload: bool = False
) -> DeepSpeedPlugin:
    """Return accelerate's plugin with DeepSpeed's settings.

    The settings come from the JSON file at `path`, otherwise from `accelerate launch`, otherwise
    from `sharding` and `offload`. The trainer sets the batch sizes, so DeepSpeed's batch-size keys
    may be "auto" or absent. For every other key, "auto" and null mean DeepSpeed's default.

    Raises:
        ConfigError: the file cannot be read, `path` and the launcher both give DeepSpeed settings,
            the trainer does not support a setting, or the ZeRO stage contradicts `sharding`.
    """
    if path is not None and "ACCELERATE_CONFIG_DS_FIELDS" in os.environ:
        raise ConfigError(
            f"deepspeed={path!r} is set, but accelerate launch has DeepSpeed settings too. Only "
            "one of the two sources can be used. Remove one of them."
        )
    path = path or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if path is not None:
        settings, source = _read(path), f"'{path}'"
        fill_settings(settings, source)
        plugin = DeepSpeedPlugin(hf_ds_config=settings)
    elif launched_by_accelerate() == "deepspeed":
        plugin, source = DeepSpeedPlugin(), "the configuration of accelerate launch"
        fill_settings(plugin.deepspeed_config, source)
    else:
        settings, source = _settings_of(sharding, offload), "the settings"
        fill_settings(settings, source)
        plugin = DeepSpeedPlugin(hf_ds_config=settings)
    stage = plugin.deepspeed_config["zero_optimization"]["stage"]
    if sharding is not None and sharding != f"zero{stage}":
        raise ConfigError(
            f"sharding={sharding!r} contradicts {source}, where the ZeRO stage is {stage}. Remove "
            "one of the two."
        )
    return plugin


def _settings_of(sharding: Sharding | None, offload: bool) -> Settings:
    zero: Settings = {"stage": KINDS.index(sharding) - KINDS.index("ddp") if sharding else 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if sharding == "zero3":
            zero["offload_param"] = {"device": "cpu"}
    return {"zero_optimization": zero}


def sharding_of(plugin: DeepSpeedPlugin) -> Sharding:
    """Return the sharding of DeepSpeed's settings; ZeRO stage 0 is "ddp"."""
    stage = plugin.deepspeed_config["zero_optimization"]["stage"]
    return KINDS[KINDS.index("ddp") + stage]


def _read(path: str) -> Settings:
    try:
        settings = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"No DeepSpeed settings can be read from '{path}': {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"The DeepSpeed settings in '{path}' are not a JSON object.")
    return settings


def fill_settings(settings: Settings, source: str) -> None:
    """Check DeepSpeed's settings, and add the trainer's settings in place.

    `source` is the origin of the settings, for error messages.

    Raises:
        ConfigError: the trainer does not support a setting; the message names the setting.
    """
    _drop_automatic(settings)
    for key, instead in _REFUSED.items():
        if (value := _lookup(settings, key, source)) not in _ACCEPTED.get(key, (None, False, 0)):
            raise ConfigError(f"{key}={value!r} in {source} is not supported: {instead}.")
    # DeepSpeed must not count microbatches: their number differs between steps, and `Engine` marks
    # the last microbatch of each step.
    ours = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": launched_processes(),
    }
    for key, value in ours.items():
        if (found := settings.get(key)) not in (None, value):
            raise ConfigError(
                f"{key}={found!r} in {source} is not supported: the trainer sets the batch sizes. "
                'Write "auto" there and set per_device_train_batch_size.'
            )
    settings.update(ours, fp16={"enabled": False}, bf16={"enabled": False}, gradient_clipping=0.0)
    # The trainer's AdamW can step on the CPU. Without this, accelerate replaces it if the optimizer
    # is offloaded.
    settings["zero_force_ds_cpu_optimizer"] = False
    stage = settings.setdefault("zero_optimization", {}).setdefault("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise ConfigError(f"stage={stage!r} in {source} is not a ZeRO stage. Write 0, 1, 2 or 3.")


def _lookup(settings: Settings, key: str, source: str) -> Any:
    section, _, rest = key.partition(".")
    if not rest:
        return settings.get(section)
    inner = settings.get(section, {})
    if not isinstance(inner, dict):
        raise ConfigError(
            f"{section}={inner!r} in {source} is not a JSON object, so DeepSpeed cannot read it. "
            "Write an object, or remove it for DeepSpeed's default."
        )
    return _lookup(inner, rest, source)


def _drop_automatic(settings: Settings) -> None:
    for key, value in list(settings.items()):
        if value in (None, "auto"):
            del settings[key]
        elif isinstance(value, dict):
            _drop_automatic(value)


def disable_compiled_collectives() -> None:
    """Make processes on the CPU communicate by gloo instead of collectives that DeepSpeed compiles.

    The compilation needs a C++ compiler and up to two minutes. If the compilation is killed, later
    runs wait forever. DeepSpeed has no setting that disables these collectives.
    """
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def build_models_unsharded() -> None:
    """Make transformers build unsharded models under ZeRO-3; `DeepSpeedEngine` shards them."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
