"""Make accelerate's `Accelerator` from the settings and the launcher's environment variables."""

import os
from datetime import timedelta

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)

from ppo_core.config.run_config import Sharding
from ppo_core.distributed import deepspeed_settings
from ppo_core.distributed.choose_sharding import (
    launched_by_accelerate,
    launched_processes,
    uses_deepspeed,
)
from ppo_core.errors import ConfigError, TrainingError


def make_accelerator(
    sharding: Sharding | None,
    *,
    settings_path: str | None,
    offload: bool,
    use_cpu: bool,
    timeout: int,
) -> tuple[Accelerator, Sharding]:
    """Connect the processes; return the Accelerator and the sharding.

    Args:
        sharding: result of `choose_sharding`; if None, DeepSpeed's settings specify the ZeRO
            stage.
        settings_path: path of a JSON file with DeepSpeed's settings.
        offload: keep optimizer states and sharded weights on the CPU.
        use_cpu: do not use a GPU.
        timeout: seconds that a process waits for other processes.

    Raises:
        ConfigError: settings or options of the launcher contradict each other, or are not
            supported.
        TrainingError: the launcher started several processes, but accelerate does not connect them.
    """
    on_cpu = use_cpu or not torch.cuda.is_available()
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))
    _forget_unconnected_state()
    if sharding is None or uses_deepspeed(sharding):
        accelerator = _deepspeed_accelerator(sharding, offload, settings_path, use_cpu, group)
        sharding = deepspeed_settings.sharding_of(accelerator.deepspeed_plugin)
    else:
        if sharding == "fsdp2":
            _init_single_process_group("gloo" if on_cpu else "nccl")
            if offload and not on_cpu:
                group.backend = "cuda:nccl,cpu:gloo"
        plugin = None
        if launched_by_accelerate() == "fsdp":
            # Without a plugin, accelerate takes the FSDP version from its own configuration, and
            # that version may be 1.
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
        accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, kwargs_handlers=[group])
    _check_connection(accelerator)
    return accelerator, sharding


def _forget_unconnected_state() -> None:
    """Reset accelerate's state if a script has created it without connecting the processes.

    Without a GPU, `PartialState` and `Accelerator` connect the processes only with `cpu=True`.
    Accelerate keeps the first state that is made in a process.
    """
    known = PartialState._shared_state
    if known and "RANK" in os.environ and known.get("num_processes") != launched_processes():
        AcceleratorState._reset_state(reset_partial_state=True)


def _check_connection(accelerator: Accelerator) -> None:
    kind, found = accelerator.distributed_type, accelerator.num_processes
    if kind == DistributedType.MEGATRON_LM:
        raise ConfigError(
            f"distributed_type={kind.value} of accelerate launch is not supported: the weights "
            "would not be sharded. Use FSDP with fsdp_version 2, or DEEPSPEED."
        )
    expected = launched_processes()
    # Accelerate can count the processes without connecting them; its distributed_type is then NO.
    connected = expected == 1 or kind != DistributedType.NO
    if found != expected or not connected:
        raise TrainingError(
            f"WORLD_SIZE={expected}, but accelerate found {found} processes with distributed_type "
            f"{kind}: each would train alone. Start the processes with torchrun or "
            "accelerate launch."
        )


def launched_precision() -> str:
    """Return the mixed precision that `accelerate launch` sets.

    Raises:
        ConfigError: the mixed precision is neither bf16 nor no.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16"):
        raise ConfigError(
            f"mixed_precision={precision} of accelerate launch is not supported: use bf16 or no."
        )
    return precision


def _deepspeed_accelerator(
    sharding: Sharding | None,
    offload: bool,
    settings_path: str | None,
    use_cpu: bool,
    group: InitProcessGroupKwargs,
) -> Accelerator:
    has_gpu = torch.cuda.is_available()
    if use_cpu and has_gpu:
        raise ConfigError(
            "use_cpu=True does not work with DeepSpeed on a machine with a GPU: DeepSpeed would "
            "use the GPU. Hide the GPU with CUDA_VISIBLE_DEVICES='' instead."
        )
    plugin = deepspeed_settings.make_plugin(settings_path, sharding, offload=offload)
    group.backend = "nccl" if has_gpu else "gloo"
    _init_single_process_group(group.backend)
    deepspeed_settings.disable_compiled_collectives()
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[group])
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise ConfigError(
            "Accelerate does not use DeepSpeed, because accelerate is set to use the CPU. Remove "
            "--cpu or use_cpu. On a machine without a GPU, DeepSpeed uses the CPU anyway."
        )
    deepspeed_settings.build_models_unsharded()
    return accelerator


def _init_single_process_group(backend: str) -> None:
    """Without a launcher, create a group of one process, because sharding needs a process group."""
    if "LOCAL_RANK" not in os.environ and not torch.distributed.is_initialized():
        os.environ["LOCAL_RANK"] = "0"
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
