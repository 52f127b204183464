"""DeepSpeed: its optimizer step, and its sharded parameters."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn


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
