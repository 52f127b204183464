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
    "fp16.enabled": "the weights stay in fp32. To compute in bfloat16, set bf16=True",
    "bf16.enabled": "the weights would become bfloat16. Set bf16=True, which keeps the weights in "
    "fp32 and computes in bfloat16",
    "torch_autocast.enabled": "it would not cover sampling and scoring. Set bf16=True, which does",
    "amp.enabled": "to compute in bfloat16, set bf16=True",
    "optimizer": "the trainer makes the optimizer. Set learning_rate, weight_decay, adam_beta1, "
    "adam_beta2 and adam_epsilon",
    "scheduler": "the trainer makes the schedule. Set lr_scheduler_type and warmup_ratio",
    "gradient_clipping": "the trainer sets it. Set max_grad_norm",
}


def make_plugin(
    path: str | None, sharding: Sharding | None = None, *, offload: bool = False
) -> DeepSpeedPlugin:
    """Return accelerate's plugin with DeepSpeed's settings.

    The settings come from the JSON file at `path`, else from `accelerate launch`, else from
    `sharding` and `offload`. The trainer sets the batch sizes, so DeepSpeed's batch-size keys may
    be "auto" or absent. For every other key "auto" means DeepSpeed's default.

    Raises:
        ConfigError: the file cannot be read, `path` and the launcher both give DeepSpeed settings,
            the trainer does not support a setting, or the ZeRO stage contradicts `sharding`.
    """
    if path is not None and "ACCELERATE_CONFIG_DS_FIELDS" in os.environ:
        raise ConfigError(
            f"deepspeed={path!r} is set, but accelerate launch has DeepSpeed settings too. Only "
            "one of the two sources can be used. Remove the other."
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
    # The trainer's AdamW can step on the CPU; DeepSpeed's CPU Adam would have to be compiled.
    return {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}


def sharding_of(plugin: DeepSpeedPlugin) -> Sharding:
    """Return the sharding of DeepSpeed's settings; ZeRO stage 0 is data parallel."""
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
    """Check DeepSpeed's settings from `source`, and add the trainer's settings in place.

    Raises:
        ConfigError: the trainer does not support a setting; the message names the setting.
    """
    for key, instead in _REFUSED.items():
        if (value := _lookup(settings, key)) not in (None, False, 0, "auto"):
            raise ConfigError(f"{key}={value!r} in {source} is not supported: {instead}.")
    # The engine marks the end of accumulation itself: the microbatches per step can vary.
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


def disable_compiled_collectives() -> None:
    """Let processes on the CPU communicate by gloo, not by collectives that DeepSpeed compiles.

    The compilation needs a C++ compiler and up to two minutes, and later runs wait forever if it
    is killed. DeepSpeed has no setting for this.
    """
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def build_models_unsharded() -> None:
    """Let transformers build models unsharded under ZeRO-3; `partition` shards them later."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def unwrap(module: Any) -> nn.Module:
    """Return the module inside a DeepSpeedEngine, or the module itself."""
    from deepspeed import DeepSpeedEngine

    return module.module if isinstance(module, DeepSpeedEngine) else module


def partition(module: nn.Module, plugin: DeepSpeedPlugin, device: torch.device) -> None:
    """Shard the parameters for ZeRO-3 one at a time, so the full module need not fit on the device.

    DeepSpeed itself would first move the full module to the device. If parameters are sharded
    already, because another model shares them, only the buffers are moved.
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
    """Shard the parameters of a frozen model; return DeepSpeed's engine around the model."""
    import deepspeed

    partition(model, plugin, device)
    settings = copy.deepcopy(plugin.deepspeed_config)
    settings["zero_optimization"].pop("offload_optimizer", None)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    return engine


def zero_stage(module: nn.Module) -> int:
    """Return the ZeRO stage of a module; 0 without ZeRO."""
    stage = getattr(module, "zero_optimization_stage", None)
    return int(stage()) if stage else 0


def step(module: Any, max_grad_norm: float) -> Tensor:
    """Clip the sharded gradients of a module under ZeRO-1, -2 or -3, and take the optimizer step.

    Return the global norm before clipping. If the norm is not finite, ZeRO skips the step in all
    processes, because they all compute the same norm.
    """
    module.optimizer.clip_grad = max_grad_norm
    module.step()
    return torch.as_tensor(module.get_global_grad_norm(), device=module.device)


def discard(module: Any) -> None:
    """Drop the gradients of a module under ZeRO-1, -2 or -3, even between two microbatches.

    DeepSpeed has no function for this, but drops gradients whose norm is NaN.
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
    # The backward pass has already computed the norms of offloaded gradients, so a NaN gradient
    # would have no effect now. Replace the function that returns the global norm instead.
    zero.scaled_global_norm = lambda: torch.tensor(torch.nan, device=module.device)
    try:
        module.step()
    finally:
        del zero.scaled_global_norm


@contextmanager
def gathered_module(module: Any) -> Iterator[None]:
    """Unshard a ZeRO-3 module inside the context, so that forward passes need no communication.

    The processes may then run different numbers of passes. Do not change weights in the context.
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
    """Make DeepSpeed fetch parameters on demand in the next passes, which are not training steps.

    Otherwise DeepSpeed would prefetch in the recorded order of the previous training step, and
    would record these passes as the order of a training step.
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
