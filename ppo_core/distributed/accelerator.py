"""Accelerate's Accelerator for a run: joins the processes as the settings and the launcher say."""

import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs

from ppo_core.distributed import deepspeed_engine
from ppo_core.distributed.strategy import Sharding, uses_deepspeed
from ppo_core.errors import ConfigError, TrainingError


def make_accelerator(
    sharding: Sharding | None,
    *,
    settings_path: str | None,
    offload: bool,
    use_cpu: bool,
    timeout: int,
) -> tuple[Accelerator, Sharding]:
    """Join the processes; return the Accelerator and how the processes share the work.

    Args:
        sharding: the choice of `choose_sharding`; None leaves the stage of ZeRO to DeepSpeed's
            settings.
        settings_path: a JSON file with DeepSpeed's settings.
        offload: keep optimizer states, and weights that are sharded, on the CPU.
        use_cpu: do not use a GPU.
        timeout: seconds that a process waits for the others.

    Raises:
        ConfigError: DeepSpeed's settings and the launcher's contradict each other.
        TrainingError: the launcher started several processes, and accelerate does not connect them.
    """
    on_cpu = use_cpu or not torch.cuda.is_available()
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))
    if sharding is None or uses_deepspeed(sharding):
        accelerator = _deepspeed_accelerator(sharding, offload, settings_path, use_cpu, group)
        sharding = deepspeed_engine.sharding_of(accelerator.deepspeed_plugin)
    else:
        if sharding == "fsdp2":
            _init_single_process_group("gloo" if on_cpu else "nccl")
            if offload and not on_cpu:
                group.backend = "cuda:nccl,cpu:gloo"
        accelerator = Accelerator(cpu=on_cpu, kwargs_handlers=[group])
    _check_connection(accelerator)
    return accelerator, sharding


def _check_connection(accelerator: Accelerator) -> None:
    kind, found = accelerator.distributed_type, accelerator.num_processes
    if kind == DistributedType.MEGATRON_LM:
        raise ConfigError(
            f"distributed_type={kind.value} of accelerate launch is not supported: nothing "
            "would be sharded as it says. Use FSDP with fsdp_version 2, or DEEPSPEED."
        )
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    # Accelerate can count the processes without connecting them: then its type is NO.
    connected = expected == 1 or kind != DistributedType.NO
    if found != expected or not connected:
        raise TrainingError(
            f"WORLD_SIZE={expected}, but accelerate found {found} processes and connects them as "
            f"{kind}: each would train alone. Start them with torchrun or accelerate launch."
        )


def launched_precision() -> str:
    """Return the mixed precision that `accelerate launch` was told to use.

    Raises:
        ConfigError: it is neither bf16 nor no.
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
            "use_cpu=True with DeepSpeed on a machine with a GPU: DeepSpeed would take the GPU. "
            "Hide it with CUDA_VISIBLE_DEVICES='' instead."
        )
    plugin = deepspeed_engine.make_plugin(settings_path, sharding, offload=offload)
    group.backend = "nccl" if has_gpu else "gloo"
    _init_single_process_group(group.backend)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[group])
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise ConfigError(
            "Accelerate left out DeepSpeed, because it was told to stay on the CPU. Start without "
            "--cpu or use_cpu; without a GPU DeepSpeed takes the CPU by itself."
        )
    deepspeed_engine.build_models_unsharded()
    return accelerator


def _init_single_process_group(backend: str) -> None:
    """Create a process group of this one process, which sharding needs, if no launcher did."""
    if "LOCAL_RANK" not in os.environ and not torch.distributed.is_initialized():
        os.environ["LOCAL_RANK"] = "0"
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
