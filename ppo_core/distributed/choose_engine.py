"""Choose the engine of a run."""

from typing import Any

from ppo_core.config.run_config import Sharding
from ppo_core.distributed.choose_sharding import choose_sharding, uses_deepspeed
from ppo_core.distributed.deepspeed_engine import DeepSpeedEngine
from ppo_core.distributed.engine import Engine
from ppo_core.distributed.fsdp_engine import FSDPEngine


def choose_engine(
    *,
    sharding: Sharding | None = None,
    offload: bool = False,
    deepspeed: str | None = None,
    **options: Any,
) -> Engine:
    """Return the engine for a sharding; see `Engine` for the other options and errors.

    If `sharding` is None, DeepSpeed's settings or the options of `accelerate launch` specify the
    sharding. If neither does, it is "ddp" for several processes and "none" for one process.

    Raises:
        ConfigError: the sharding, the other settings and the launcher contradict each other.
    """
    chosen = choose_sharding(sharding, deepspeed=deepspeed, offload=offload)
    kind = FSDPEngine if chosen == "fsdp2" else Engine
    if chosen is None or uses_deepspeed(chosen):
        kind = DeepSpeedEngine
    return kind(sharding=chosen, offload=offload, deepspeed=deepspeed, **options)
