"""Choose the sharding of a run from the settings and the launcher's variables."""

import logging
import os
from typing import Literal, get_args

from ppo_core.config.run_config import Sharding
from ppo_core.distributed.process import is_main_process
from ppo_core.errors import ConfigError

logger = logging.getLogger(__name__)

SHARD_WEIGHTS: tuple[Sharding, ...] = ("zero3", "fsdp2")
"""Kinds of sharding in which each process has only a shard of the weights."""

KINDS: tuple[Sharding, ...] = get_args(Sharding)


def uses_deepspeed(sharding: str | None) -> bool:
    """Return whether DeepSpeed implements this sharding."""
    return sharding is not None and sharding.startswith("zero")


def choose_sharding(
    sharding: Sharding | None, *, deepspeed: str | None, offload: bool, processes: int | None = None
) -> Sharding | None:
    """Return the sharding to use; None means that DeepSpeed's settings choose the ZeRO stage.

    `deepspeed` is the path of a JSON file with DeepSpeed's settings. The options of `accelerate
    launch`, and `processes` if it is None, are read from the environment.

    Raises:
        ConfigError: two settings contradict each other; the message names both.
    """
    _check_number_launched()
    processes = processes or launched_processes()
    launched = launched_by_accelerate()
    if launched == "deepspeed" or deepspeed is not None:
        chosen = _with_deepspeed(sharding, deepspeed, offload)
    elif launched == "fsdp":
        chosen = _with_fsdp(sharding)
    else:
        chosen = sharding or ("ddp" if processes > 1 else "none")
    if chosen == "none" and processes > 1:
        raise ConfigError(
            f"sharding='none' is for one process, but {processes} processes were launched: "
            "each would train alone. Set sharding='ddp', or start one process."
        )
    if offload and chosen in ("none", "ddp"):
        raise ConfigError(
            f"offload=True has no effect with sharding={chosen!r}: only sharded states can be "
            "moved to the CPU. Set sharding to zero1, zero2, zero3 or fsdp2, or offload=False."
        )
    return chosen


def launched_processes() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_by_accelerate() -> Literal["deepspeed", "fsdp"] | None:
    """Return whether `accelerate launch` selects DeepSpeed or FSDP; None if it selects neither."""
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        return "deepspeed"
    return "fsdp" if _is_on("ACCELERATE_USE_FSDP") else None


def fsdp_offloads() -> bool:
    """Return whether the configuration of `accelerate launch` makes FSDP offload to the CPU."""
    return launched_by_accelerate() == "fsdp" and _is_on("FSDP_OFFLOAD_PARAMS")


def _check_number_launched() -> None:
    """Raise if `accelerate launch` was asked for several processes but started only one.

    In this case, accelerate sets MASTER_ADDR for connecting processes, but not WORLD_SIZE.
    """
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ
    if by_accelerate and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "accelerate launch started one process instead of several. It does so with --cpu, "
            "use_cpu: true or distributed_type: MULTI_CPU. The run would have smaller "
            "batches and more updates. Start the processes with torchrun --nproc-per-node N, or "
            "with distributed_type: MULTI_GPU (--multi_gpu), which works without a GPU too."
        )


def _with_deepspeed(
    sharding: Sharding | None, deepspeed: str | None, offload: bool
) -> Sharding | None:
    source = "accelerate launch with DeepSpeed" if deepspeed is None else f"deepspeed={deepspeed!r}"
    if sharding is not None and not uses_deepspeed(sharding):
        raise ConfigError(
            f"sharding={sharding!r} and {source} contradict each other. Remove one of the two."
        )
    if offload:
        raise ConfigError(
            f"offload=True does not work with {source}: DeepSpeed's own settings control "
            "offloading. Set offload_optimizer and offload_param there, and offload=False."
        )
    return sharding


_FSDP_ACCEPTED = {
    "FSDP_RESHARD_AFTER_FORWARD": (
        ("true", "full_shard"),
        "true",
        "sets fsdp_reshard_after_forward: true, which reshards a layer after its forward pass",
    ),
    "FSDP_SHARDING_STRATEGY": (
        ("full_shard", "1"),
        "full_shard",
        "sets fsdp_sharding_strategy: FULL_SHARD, or leaves it out",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        ("false",),
        "false",
        "omits fsdp_activation_checkpointing; set gradient_checkpointing=True instead",
    ),
    "FSDP_AUTO_WRAP_POLICY": (
        ("transformer_based_wrap",),
        "transformer_based_wrap",
        "sets fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, which makes one group per layer",
    ),
}
"""Accepted values, default, and description of a valid configuration, by environment variable."""


def _with_fsdp(sharding: Sharding | None) -> Sharding:
    if sharding not in (None, "fsdp2"):
        raise ConfigError(
            f"sharding={sharding!r} and accelerate launch with FSDP contradict each other. Remove "
            "one of the two."
        )
    if is_main_process() and os.environ.get("FSDP_VERSION", "1") != "2":
        logger.warning("FSDP version 1 of accelerate launch is run as version 2.")
    for name, (accepted, default, instead) in _FSDP_ACCEPTED.items():
        value = os.environ.get(name, default)
        if value.lower() not in accepted:
            raise ConfigError(
                f"{name}={value} of accelerate launch is not supported. A supported configuration "
                f"{instead}. See infra/accelerate/fsdp2.yaml for an example."
            )
    return "fsdp2"


def _is_on(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"
