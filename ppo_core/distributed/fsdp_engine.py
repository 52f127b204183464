"""FSDP2: shard parameters, and unshard them for forward passes and for reading.

Each layer of a model is an FSDP group. Outside `gathered`, the group of a layer is unsharded only
during the passes of this layer. Embeddings, head and norms form the root's group. After a pass
without gradients, the root's group stays unsharded until a `gathered` ends: the one around the
pass, or else the next one.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)
from torch.optim import Optimizer

from ppo_core.distributed.engine import Engine, Model
from ppo_core.errors import ConfigError


class FSDPEngine(Engine):
    """Trains with PyTorch's FSDP2, which shards weights, gradients and optimizer states."""

    def _prepared(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Shard a module in place, and put the shards into the groups of its optimizer."""
        if optimizer.state:
            raise ConfigError(
                f"The {type(optimizer).__name__} has already taken steps. sharding='fsdp2' would "
                "lose the optimizer's moments. Pass a new optimizer."
            )
        name_of = {id(parameter): name for name, parameter in module.named_parameters()}
        _shard(module, self.device, offload=self.offloads)
        shards = dict(module.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [
                shards[name_of[id(p)]] if id(p) in name_of else p for p in group["params"]
            ]
        return module

    def prepare_frozen(self, model: Model) -> Model:
        """Freeze a model and shard it in place.

        A hook unshards the root's parameters if a caller calls the backbone instead of the root.
        """
        super().prepare_frozen(model)
        _shard(model, self.device, offload=self.offloads)
        root: Any = model
        inner: Any = getattr(model, "model", model)
        for part in {inner, getattr(inner, "base_model", inner)} - {model}:
            part.register_forward_pre_hook(lambda *_: root.unshard())
        return model

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which a prepared module is unsharded; see `Engine.gathered`."""
        if isinstance(module, FSDPModule):
            return _gathered(module, layers=self.gathers_layers)
        return nullcontext()

    def _make_writable(self, module: nn.Module) -> None:
        # The root's group of a frozen module can still be unsharded after forward passes. Values
        # that are written to unsharded parameters are lost.
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _shard(module: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Shard each parameter in place over all processes; parameter names do not change.

    Weights move to the device layer by layer, because the full module may not fit on the device.
    With `offload`, the shards and their optimizer states are on the CPU.
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


@contextmanager
def _gathered(module: Any, *, layers: bool) -> Iterator[None]:
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
