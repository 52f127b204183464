"""Convert ZeRO's shards of fp32 weights and optimizer states to unsharded tensors and back.

DeepSpeed flattens the parameters of a group and gives each process one slice, its partition. The
partition is a flat fp32 tensor. The optimizer updates the partition, and keeps moments of the same
shape.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.distributed.optimizer_shards import as_tensor, as_value, check_shape


@dataclass(frozen=True)
class _Piece:
    """The slice of a parameter that is in this process's partition."""

    flat: nn.Parameter
    """The partition, which the optimizer updates."""

    at: int
    """Index of the slice's first element in the partition."""

    start: int
    """Index of the slice's first element in the flattened parameter."""

    numel: int
    """Number of elements in the slice; 0 if all elements are in other processes."""

    def of(self, flat: Tensor) -> Tensor:
        """Return the slice of `flat`, which is the partition or a moment of the same shape."""
        return flat.detach()[self.at : self.at + self.numel]

    def put(self, flat: Tensor, full: Tensor) -> None:
        """Copy the slice of an unsharded tensor into `flat`, the partition or a moment."""
        self.of(flat).copy_(full.flatten()[self.start : self.start + self.numel])

    def gathered(self, flat: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
        """Return the unsharded tensor in every process; all processes must call this."""
        full = torch.zeros(shape.numel(), dtype=flat.dtype, device=device)
        full[self.start : self.start + self.numel].copy_(self.of(flat))
        # Adding zeros to the bits as integers keeps every bit, including the sign of -0.0.
        torch.distributed.all_reduce(full.view(torch.int32))
        return full.view(shape)


def _pieces(engine: Any) -> dict[nn.Parameter, _Piece]:
    zero = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        rank = torch.distributed.get_rank()
        pieces = {}
        for parameter in _trained(engine):
            group, at, numel = zero.grad_position[zero.get_param_id(parameter)]
            # The last partition is padded to the length of the others.
            start = min(numel * rank, parameter.ds_numel)
            own = min(numel, parameter.ds_numel - start)
            pieces[parameter] = _Piece(zero.fp32_partitioned_groups_flat[group], at, start, own)
        return pieces
    pieces = {}
    for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        for parameter in group:
            found = parameter._hp_mapping
            if found is None:
                pieces[parameter] = _Piece(flat, 0, 0, 0)
            else:
                in_flat, in_own = found.hp_fragment_address, found.lp_fragment_address
                pieces[parameter] = _Piece(flat, in_flat.start, in_own.start, in_own.numel)
    return pieces


def _trained(engine: Any) -> list[Any]:
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad]


def full_shape(parameter: Any) -> torch.Size:
    """Return the unsharded shape of a parameter, whether or not ZeRO-3 shards the parameter."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@torch.no_grad()
def load_weights(engine: Any, weight_of: Callable[[str], Tensor | None]) -> None:
    """Copy unsharded tensors into the weights of a ZeRO module and into its fp32 partitions."""
    pieces = _pieces(engine)
    for name, parameter in engine.module.named_parameters():
        weight = weight_of(name)
        if weight is not None:
            check_shape(name, full_shape(parameter), weight.shape)
            set_weight(parameter, weight)
            if parameter in pieces:
                pieces[parameter].put(pieces[parameter].flat, weight)


def set_weight(parameter: Any, weight: Tensor) -> None:
    """Copy an unsharded tensor into a parameter, whether or not ZeRO-3 shards the parameter."""
    if not hasattr(parameter, "ds_id"):
        parameter.detach().copy_(weight)
        return
    shard = parameter.ds_tensor.detach().view(-1)
    start = min(shard.numel() * torch.distributed.get_rank(), parameter.ds_numel)
    own = min(shard.numel(), parameter.ds_numel - start)
    shard[:own].copy_(weight.flatten()[start : start + own])
    # DeepSpeed keeps an additional unsharded copy of small parameters.
    if parameter.shape == parameter.ds_shape:
        parameter.detach().copy_(weight)


def optimizer_states(engine: Any) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield each trained parameter's name and unsharded optimizer state, in every process."""
    optimizer, pieces = engine.optimizer.optimizer, _pieces(engine)
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            piece = pieces[parameter]
            tensors = {
                key: as_tensor(optimizer, key, value)
                for key, value in optimizer.state.get(piece.flat, {}).items()
                if value is not None
            }
            yield (
                name,
                {
                    key: piece.gathered(tensor, full_shape(parameter), engine.device)
                    if tensor.shape == piece.flat.shape
                    else tensor
                    for key, tensor in tensors.items()
                },
            )


@torch.no_grad()
def load_optimizer_states(engine: Any, state_of: Callable[[str], dict[str, Tensor]]) -> None:
    """Restore states that `optimizer_states` yielded, possibly with another number of processes."""
    optimizer, pieces = engine.optimizer.optimizer, _pieces(engine)
    for flat in {id(piece.flat): piece.flat for piece in pieces.values()}.values():
        optimizer.state.pop(flat, None)
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            piece = pieces[parameter]
            state = optimizer.state[piece.flat] if (tensors := state_of(name)) else {}
            for key, tensor in tensors.items():
                if tensor.ndim == 0:
                    state[key] = as_value(tensor, optimizer.param_groups[0], piece.flat.device)
                    continue
                check_shape(f"{key} of {name}", full_shape(parameter), tensor.shape)
                if key not in state:
                    state[key] = torch.zeros_like(piece.flat, dtype=tensor.dtype).detach()
                piece.put(state[key], tensor)
