"""FSDP2 in its own words: parameters in shards, and whole where they are needed.

Each layer of a model is a group of its own, gathered for its passes; embeddings, head and norms
are the root's group. A root's group that was gathered for a pass without a gradient stays
whole until `gathered` ends.
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
    """Keep this process's shard of each parameter alone; in place, the names stay.

    Weights move to the device layer by layer, so the whole module need not fit there. With
    `offload` the shards, and what an optimizer keeps for them, are on the CPU.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    has_gpu = device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=has_gpu) if offload else OffloadPolicy()
    layers = {id(layer): layer for layer in _layers(module)}
    for part in [*layers.values(), module]:
        fully_shard(part, mesh=mesh, offload_policy=policy)
    # Torch takes the first part that is called for the root, and parts are called one by one.
    root: Any = module
    root._get_fsdp_state()._lazy_init()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules: where transformers has its layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def shard_trained(
    module: nn.Module, optimizer: Optimizer, device: torch.device, *, offload: bool
) -> None:
    """Shard a module, and let its optimizer move the shards: the same object, the same groups.

    Raises:
        ConfigError: the optimizer has taken steps already, on parameters that are whole.
    """
    if optimizer.state:
        raise ConfigError(
            f"The {type(optimizer).__name__} that was handed over has taken steps already, and "
            "sharding='fsdp2' would lose its moments. Hand over a fresh one."
        )
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    shard(module, device, offload=offload)
    shards = dict(module.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [
            shards[name_of[id(p)]] if id(p) in name_of else p for p in group["params"]
        ]


def shard_frozen(module: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Shard a module that is not trained, whose backbone is called by itself as well."""
    shard(module, device, offload=offload)
    root: Any = module
    model: Any = getattr(module, "model", module)
    for part in {model, getattr(model, "base_model", model)} - {module}:
        part.register_forward_pre_hook(lambda *_: root.unshard())


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards the module and is told so by it: the root, not a part of it."""
    return isinstance(module, FSDPModule)


@contextmanager
def gathered(module: Any, *, layers: bool) -> Iterator[None]:
    """Inside, the root's own group is whole; with `layers` all is, and no pass communicates."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    whole = parts if layers else [module]
    for part in whole:
        part.unshard()
    if layers:
        module.set_reshard_after_forward(False)
    try:
        yield
    finally:
        if layers:
            module.set_reshard_after_forward(True)
            module.set_reshard_after_forward(False, recurse=False)
        for part in whole:
            part.reshard()


def reshard(module: nn.Module) -> None:
    """Drop what was gathered, so that what is written to the parameters stays; all else as it is.

    The root's group of a frozen module stays whole after its passes.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, in every process; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a whole tensor, cut as `like` is; as it is if `like` is whole."""
    if not isinstance(like, DTensor):
        return tensor
    on_device = tensor.to(like.device)
    # No source: every process has the whole, and nothing is sent.
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)
