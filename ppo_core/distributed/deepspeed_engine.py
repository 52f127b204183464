"""DeepSpeed: its settings, its optimizer step, and its sharded parameters."""

import copy
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn

from ppo_core.distributed.strategy import KINDS, Sharding, launched_by_accelerate
from ppo_core.errors import ConfigError

Settings = dict[str, Any]

_REFUSED = {
    "fp16.enabled": "the weights stay in fp32; bf16=True computes in bfloat16",
    "bf16.enabled": "the weights would become bfloat16; bf16=True keeps them in fp32 and computes "
    "in bfloat16",
    "torch_autocast.enabled": "bf16=True does the same for sampling and scoring too",
    "amp.enabled": "bf16=True computes in bfloat16",
    "optimizer": "the trainer makes the optimizer; set learning_rate, weight_decay and adam_beta1, "
    "adam_beta2, adam_epsilon",
    "scheduler": "the trainer makes the schedule; set lr_scheduler_type and warmup_ratio",
    "gradient_clipping": "set max_grad_norm",
}


def make_plugin(
    path: str | None, sharding: Sharding | None = None, *, offload: bool = False
) -> DeepSpeedPlugin:
    """Return accelerate's plugin with DeepSpeed's settings.

    They come from the JSON file at `path`, else from `accelerate launch`, else from `sharding`
    and `offload`. The trainer sets the batch sizes, so DeepSpeed's keys for them may be "auto" or
    absent. Every other "auto" means DeepSpeed's default.

    Raises:
        ConfigError: the file cannot be read, the launcher has DeepSpeed settings too, a setting
            belongs to the trainer, or the stage contradicts `sharding`.
    """
    if path is not None and "ACCELERATE_CONFIG_DS_FIELDS" in os.environ:
        raise ConfigError(
            f"deepspeed={path!r} is set, and accelerate launch was started with DeepSpeed settings "
            "too: one of them would be ignored. Remove one."
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
            f"sharding={sharding!r}, and {source} says stage {stage}. Remove one of the two."
        )
    return plugin


def _settings_of(sharding: Sharding | None, offload: bool) -> Settings:
    zero: Settings = {"stage": KINDS.index(sharding) - KINDS.index("ddp") if sharding else 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if sharding == "zero3":
            zero["offload_param"] = {"device": "cpu"}
    # The trainer's AdamW can step on the CPU; DeepSpeed's own would be compiled on first use.
    return {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}


def sharding_of(plugin: DeepSpeedPlugin) -> Sharding:
    """Return the sharding of DeepSpeed's settings; its stage 0 is data parallel."""
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
    """Check DeepSpeed's settings from `source` and add the trainer's, in place.

    Raises:
        ConfigError: a setting contradicts the trainer; the message names it.
    """
    for key, instead in _REFUSED.items():
        if (value := _lookup(settings, key)) not in (None, False, 0, "auto"):
            raise ConfigError(f"{key}={value!r} in {source} is not supported: {instead}.")
    # The engine marks the end of accumulation itself: its length changes from step to step.
    ours = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": int(os.environ.get("WORLD_SIZE", "1")),
    }
    for key, value in ours.items():
        if (found := settings.get(key)) not in (None, value, "auto"):
            raise ConfigError(
                f"{key}={found!r} in {source} is not supported: the trainer sets the batch sizes. "
                'Write "auto" there and set per_device_train_batch_size.'
            )
    _drop_automatic(settings)
    settings.update(ours, fp16={"enabled": False}, bf16={"enabled": False}, gradient_clipping=0.0)
    settings.setdefault("zero_optimization", {}).setdefault("stage", 0)


def _lookup(settings: Settings, key: str) -> Any:
    section, _, name = key.partition(".")
    return settings.get(section, {}).get(name) if name else settings.get(section)


def _drop_automatic(settings: Settings) -> None:
    for key, value in list(settings.items()):
        if value == "auto":
            del settings[key]
        elif isinstance(value, dict):
            _drop_automatic(value)


def build_models_unsharded() -> None:
    """Let transformers build models unsharded until they are prepared, under ZeRO-3 too."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def unwrap(module: Any) -> nn.Module:
    """Return the module inside a DeepSpeedEngine, or the module itself."""
    from deepspeed import DeepSpeedEngine

    return module.module if isinstance(module, DeepSpeedEngine) else module


def partition(module: nn.Module, plugin: DeepSpeedPlugin, device: torch.device) -> None:
    """Shard each parameter as ZeRO-3 does, one at a time, so the full module need not fit.

    DeepSpeed moves a module that it is given unsharded to the device in full. Parameters that are
    sharded already, because another model shares them, stay as they are.
    """
    from deepspeed.runtime.zero import Init

    if not any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        offloaded = plugin.deepspeed_config["zero_optimization"].get("offload_param", {})
        remote = offloaded.get("device", "none")
        Init(
            module=module,
            config_dict_or_path=plugin.deepspeed_config,
            remote_device=None if remote == "none" else remote,
        )
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def initialize_frozen(model: nn.Module, plugin: DeepSpeedPlugin, device: torch.device) -> Any:
    """Shard the parameters of a frozen model; return DeepSpeed's engine around it."""
    import deepspeed

    partition(model, plugin, device)
    settings = copy.deepcopy(plugin.deepspeed_config)
    settings["zero_optimization"].pop("offload_optimizer", None)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    return engine


def zero_stage(module: nn.Module) -> int:
    """Return the stage of ZeRO that shards a module; 0 if nothing of it is sharded."""
    stage = getattr(module, "zero_optimization_stage", None)
    return int(stage()) if stage else 0


def step(module: Any, max_grad_norm: float) -> Tensor:
    """Clip the sharded gradients of a module in ZeRO's stages 1 to 3, and step.

    Return the global norm before clipping. ZeRO itself skips a step whose norm is not finite, in
    all processes, since the norm is a sum over them.
    """
    module.optimizer.clip_grad = max_grad_norm
    module.step()
    return torch.as_tensor(module.get_global_grad_norm(), device=module.device)


def discard(module: Any) -> None:
    """Drop the gradients of a module in ZeRO's stages 1 to 3, also in the middle of a step.

    DeepSpeed has no call for this, but it drops gradients whose norm is NaN.
    """
    from deepspeed.utils import safe_set_local_grad

    module.set_gradient_accumulation_boundary(True)
    zero = module.optimizer
    if zero_stage(module) == 3:
        if not zero.offload_optimizer and not any(zero.averaged_gradients.values()):
            return  # there was no backward pass
        parameter = next(p for p in module.parameters() if p.requires_grad)
        safe_set_local_grad(parameter, torch.full_like(parameter.ds_tensor, torch.nan))
        module.step()
        return
    # Norms of offloaded gradients were computed in the backward pass: a NaN gradient is too late.
    zero.scaled_global_norm = lambda: torch.tensor(torch.nan, device=module.device)
    try:
        module.step()
    finally:
        del zero.scaled_global_norm


@contextmanager
def gathered_module(module: Any) -> Iterator[None]:
    """Unshard a module under ZeRO-3 inside the context, where forward passes communicate nothing.

    So the processes may make different numbers of passes. Nothing may be changed inside.
    """
    from deepspeed.runtime.zero import unwrap_model_for_generation

    fetcher = _fetcher(module)
    try:
        with unwrap_model_for_generation(module):
            yield
    finally:
        # DeepSpeed restores its fetching hooks, but not after an error.
        if not fetcher.forward_hooks:
            fetcher._register_deepspeed_module(fetcher.module)


def forget_order(module: Any) -> None:
    """Make DeepSpeed fetch parameters on demand in the passes that follow, outside training.

    By default it prefetches in the order of the previous step, and records these passes as one.
    """
    coordinator = _fetcher(module).get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def _fetcher(module: Any) -> Any:
    """Return the object that fetches the parameters of a trained or frozen module under ZeRO-3."""
    return getattr(module.optimizer, "parameter_offload", module.optimizer)


def gathered_parameter(parameter: Any) -> AbstractContextManager[Any]:
    """Return a context in which a parameter is unsharded, whether or not ZeRO-3 shards it."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters, ZeroParamStatus

    return GatheredParameters([parameter], enabled=parameter.ds_status != ZeroParamStatus.AVAILABLE)
