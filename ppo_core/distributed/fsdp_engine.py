"""FSDP2: shard parameters, and unshard them for passes and for reading.

Each layer of a model is an FSDP group of its own, unsharded only during its passes. Embeddings,
head and norms are the root's group. After a pass without gradients the root's group stays
unsharded until `gathered` ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ppo_core.errors import ConfigError


def shard(module: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Shard each parameter in place over all processes; parameter names do not change.

    Weights move to the device layer by layer, so the full module need not fit on the device. With
    `offload` the shards and their optimizer states are on the CPU.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    has_gpu = device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=has_gpu) if offload else OffloadPolicy()
    layers = {id(layer): layer for layer in _layers(module)}
    for part in [*layers.values(), module]:
        fully_shard(part, mesh=mesh, offload_policy=policy)
    # Mark `module` as the root now: torch would take the first called submodule as the root, and
    # callers call submodules one by one.
    root: Any = module
    root._get_fsdp_state()._lazy_init()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost ModuleLists, where transformers keeps its layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def shard_trained(
    module: nn.Module, optimizer: Optimizer, device: torch.device, *, offload: bool
) -> None:
    """Shard a module in place, and put the shards into the parameter groups of its optimizer.

    Raises:
        ConfigError: the optimizer has already taken steps, on unsharded parameters.
    """
    if optimizer.state:
        raise ConfigError(
            f"The {type(optimizer).__name__} has already taken steps. sharding='fsdp2' would lose "
            "the optimizer's moments. Pass a new optimizer."
        )
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    shard(module, device, offload=offload)
    shards = dict(module.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [
            shards[name_of[id(p)]] if id(p) in name_of else p for p in group["params"]
        ]


def shard_frozen(module: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Shard a frozen module in place; its backbone may be called without the root module."""
    shard(module, device, offload=offload)
    root: Any = module
    model: Any = getattr(module, "model", module)
    for part in {model, getattr(model, "base_model", model)} - {module}:
        part.register_forward_pre_hook(lambda *_: root.unshard())


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 shards the module as the root or as a layer."""
    return isinstance(module, FSDPModule)


@contextmanager
def gathered(module: Any, *, layers: bool) -> Iterator[None]:
    """Unshard the root's group inside the context.

    With `layers`, unshard all groups, so that passes need no communication.
    """
    groups = [part for part in module.modules() if isinstance(part, FSDPModule)]
    unsharded = groups if layers else [module]
    for group in unsharded:
        group.unshard()
    if layers:
        module.set_reshard_after_forward(False)
    try:
        yield
    finally:
        if layers:
            module.set_reshard_after_forward(True)
            module.set_reshard_after_forward(False, recurse=False)
        for group in unsharded:
            group.reshard()


def reshard(module: nn.Module) -> None:
    """Reshard all groups, so that values written to the parameters are kept.

    The root's group of a frozen module can still be unsharded after passes.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def unsharded(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded tensor in every process; return others unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor as `like` is sharded; return `tensor` unchanged if `like` is full."""
    if not isinstance(like, DTensor):
        return tensor
    on_device = tensor.to(like.device)
    # Every process has the full tensor, so no source rank needs to send it.
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)
