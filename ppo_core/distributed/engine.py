"""Device, precision and collectives of a run; shard and gather models over several processes.

In one process, every collective operation returns its input. Under torchrun or `accelerate launch`,
`Engine` trains data parallel, and its subclasses shard the models; see `choose_engine`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ppo_core.config.run_config import Sharding
from ppo_core.data.types import Record, map_tensors
from ppo_core.distributed.choose_sharding import SHARD_WEIGHTS, fsdp_offloads
from ppo_core.distributed.exchange_objects import ProcessGroup
from ppo_core.distributed.init_distributed import launched_precision, make_accelerator
from ppo_core.distributed.optimizer_shards import (
    check_shape,
    read_state,
    sharded_like,
    unsharded,
    write_state,
)
from ppo_core.distributed.process import let_gloo_finish_at_exit
from ppo_core.errors import ConfigError

Model = TypeVar("Model", bound=nn.Module)
Item = TypeVar("Item")

StateOf = Callable[[str], dict[str, Tensor]]
"""Function that returns the optimizer state of a parameter, by the parameter's name."""


class Engine:
    """Interface to accelerate for one process, or for several processes that train data parallel.

    `FSDPEngine` and `DeepSpeedEngine` shard models; `choose_engine` returns the engine of a run.
    All processes must call the collective methods (`prepare`, `backward`, `step`, `sum`, ...) in
    the same order.
    """

    def __init__(
        self,
        *,
        bf16: bool | None = None,
        use_cpu: bool = False,
        sharding: Sharding | None = "none",
        offload: bool = False,
        deepspeed: str | None = None,
        gather_for_generation: bool = True,
        timeout: int = 1800,
    ) -> None:
        """Connect this process to the other processes of the run.

        Args:
            bf16: compute in bfloat16 by autocast; weights stay in fp32. None means True under
                `accelerate launch` with mixed precision bf16, and otherwise False.
            use_cpu: do not use a GPU.
            sharding: result of `choose_sharding`.
            offload: keep optimizer states and sharded weights on the CPU.
            deepspeed: path of a JSON file with DeepSpeed's settings.
            gather_for_generation: let `gathered` gather all layers at once.
            timeout: seconds that a process waits for other processes.

        Raises:
            ConfigError: settings or options of the launcher contradict each other, or are not
                supported.
            TrainingError: the launcher started several processes, but accelerate does not connect
                them.
        """
        self._bf16 = launched_precision() == "bf16" or bool(bf16)
        if self._bf16 and bf16 is False:
            raise ConfigError(
                "bf16=False and mixed_precision: bf16 of accelerate launch contradict each other. "
                "Remove one of the two."
            )
        self.gathers_layers = gather_for_generation
        """Whether `gathered` gathers all layers at once."""
        self.offloads = offload or fsdp_offloads()
        """Whether optimizer states and sharded weights are kept on the CPU."""
        self._accelerator, self.sharding = make_accelerator(
            sharding,
            settings_path=deepspeed,
            offload=self.offloads,
            use_cpu=use_cpu,
            timeout=timeout,
        )
        self.peers = ProcessGroup.of_training()
        """All processes of the run; they communicate over the connections of the training."""
        # Without this call, a user's own script that makes an Engine with gloo could abort at exit.
        if torch.distributed.is_initialized():
            let_gloo_finish_at_exit()

    @property
    def accelerator(self) -> Accelerator:
        """Accelerate's Accelerator, for scripts that use it directly."""
        return self._accelerator

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._accelerator.device

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self._accelerator.process_index

    @property
    def num_processes(self) -> int:
        """Number of processes in the run."""
        return self._accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the process that writes the files and the log."""
        return self._accelerator.is_main_process

    @property
    def computes_in_bf16(self) -> bool:
        """Whether passes compute in bfloat16 by autocast."""
        return self._bf16

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed trains the prepared module."""
        return self._accelerator.distributed_type == DistributedType.DEEPSPEED

    @property
    def shards_weights(self) -> bool:
        """Whether each process holds only its shard of a prepared module's weights."""
        return self.sharding in SHARD_WEIGHTS

    @property
    def is_plain(self) -> bool:
        """Whether a prepared module is trained unsharded and in one process."""
        return self.num_processes == 1 and self.sharding in ("none", "ddp")

    def place(self, model: Model) -> Model:
        """Move a model to the device, unless it will be sharded: a full model may not fit."""
        return model if self.shards_weights else model.to(self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which forward passes compute in the precision of training.

        Use the context for sampling and scoring; a prepared module applies autocast by itself.
        """
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16)

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return the module and its optimizer, ready for training in all processes.

        With sharding "none", the same two objects are returned. The optimizer keeps its parameter
        groups, so an existing learning-rate schedule stays valid. Prepare each module only once.
        """
        self.place(module)
        if self._bf16:
            # A wrapper module would change the names of the parameters, so replace the method.
            module.forward = torch.autocast(self.device.type, torch.bfloat16)(module.forward)
        return self._prepared(module, optimizer), optimizer

    def _prepared(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the module to train: the same module, sharded or not, or a wrapper around it."""
        if self.num_processes == 1:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices)

    def prepare_frozen(self, model: Model) -> Model:
        """Freeze a model, shard it under zero3 and fsdp2, and move it to the device.

        Return the same object.
        """
        return self.place(model.eval().requires_grad_(False))

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the module inside DeepSpeed's or DDP's wrapper, or the module itself."""
        return module.module if isinstance(module, DistributedDataParallel) else module

    def accumulate_only(self, module: nn.Module, accumulate: bool) -> AbstractContextManager[None]:
        """Return a context for the forward and backward pass of one microbatch.

        `accumulate` is False only for the last microbatch of a step. The gradients of the earlier
        microbatches need not be reduced over the processes yet.
        """
        if accumulate and isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one microbatch's loss.

        Training minimizes the sum of the losses of all processes and microbatches. The loss is
        multiplied by the number of processes, because data parallel engines average the gradients
        over the processes.
        """
        (loss * self.num_processes).backward()

    def step(self, module: nn.Module, optimizer: Optimizer, max_grad_norm: float) -> Tensor:
        """Clip the global gradient norm, take the optimizer step, and zero the gradients.

        Return the norm before clipping, which is the same in all processes. If the norm is not
        finite, every process skips the step and leaves weights and moments unchanged.
        """
        norm = unsharded(nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm))
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad()
        return norm

    def discard(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Zero the gradients without a step; leave weights and moments unchanged."""
        optimizer.zero_grad()

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which a prepared module is unsharded for sampling and scoring.

        Submodules may be called one by one. The number of calls may differ between processes,
        unless `requires_equal_passes` returns True. Do not train or change the weights inside the
        context. If `module` is a submodule of a sharded module, the context has no effect.
        """
        return nullcontext()

    @contextmanager
    def all_gathered(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Enter `gathered` for several modules at once."""
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(self.gathered(module))
            yield

    def requires_equal_passes(self) -> bool:
        """Return whether each pass inside `gathered` waits for all processes.

        Passes wait if weights are sharded and `gather_for_generation` is off. A process that has
        finished its responses must then run further passes, until all processes have finished.
        """
        return self.shards_weights and not self.gathers_layers

    def full_state_dict(self, module: nn.Module) -> dict[str, Tensor] | None:
        """Copy the state dict of a module, unsharded, to the CPU of the main process.

        The other processes return None. `module` is a prepared module or a submodule of one. Tied
        tensors (embeddings) stay tied in the copy.
        """
        tensors = self.unwrap(module).state_dict(keep_vars=True)
        copies: dict[int, Tensor] = {}
        for key, tensor in {id(tensor): tensor for tensor in tensors.values()}.items():
            with self._readable(tensor):
                found = unsharded(tensor.detach())
                if self.is_main:
                    copies[key] = found.to("cpu", copy=True)
        if not self.is_main:
            return None
        return {name: copies[id(tensor)] for name, tensor in tensors.items()}

    @torch.no_grad()
    def load_weights(self, module: nn.Module, weight_of: Callable[[str], Tensor | None]) -> None:
        """Copy the unsharded tensor `weight_of(name)` into each parameter, bit for bit.

        `module` is a prepared module, trained or frozen. Its parameters have the names that
        `named_parameters()` returned before the module was prepared. If `weight_of` returns None,
        the parameter stays unchanged.

        Raises:
            TrainingError: a tensor and its parameter differ in shape.
        """
        self._make_writable(module)
        for name, parameter in self.unwrap(module).named_parameters():
            weight = weight_of(name)
            if weight is not None:
                self._write(name, parameter, weight)

    @torch.no_grad()
    def copy_weights(self, source: nn.Module, target: nn.Module) -> None:
        """Set each parameter of a frozen `target` to the parameter of the same name in `source`.

        `source` and `target` are prepared modules or their submodules, with equal shapes.
        """
        self._make_writable(target)
        sources = dict(source.named_parameters())
        for name, parameter in target.named_parameters():
            with self._readable(sources[name]):
                self._write(name, parameter, unsharded(sources[name].detach()))

    def _readable(self, tensor: Tensor) -> AbstractContextManager[Any]:
        """Return a context in which `unsharded` returns the full parameter or buffer."""
        return nullcontext()

    def _make_writable(self, module: nn.Module) -> None:
        """Put a module's parameters into a state in which written values are kept."""

    def _write(self, name: str, parameter: nn.Parameter, weight: Tensor) -> None:
        """Copy an unsharded tensor into a parameter; raise if the shapes differ."""
        check_shape(name, parameter.shape, weight.shape)
        parameter.copy_(sharded_like(weight, parameter))

    def optimizer_states(
        self, module: nn.Module, optimizer: Optimizer
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each trained parameter's name and unsharded optimizer state, in every process.

        The state (exp_avg, exp_avg_sq, step, ...) is empty before the first step. Plain numbers
        become 0-dimensional tensors of int64 or float64. Unsharded tensors are not copied. All
        processes must consume all items, because gathering is collective.

        Raises:
            TrainingError: the state holds a value that is neither a tensor nor a number.
        """
        for name, parameter in self.unwrap(module).named_parameters():
            if parameter.requires_grad:
                yield name, read_state(optimizer, parameter)

    @torch.no_grad()
    def load_optimizer_states(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        state_of: StateOf,
    ) -> None:
        """Restore the states that `optimizer_states` yielded, by parameter name, bit for bit."""
        for name, parameter in self.unwrap(module).named_parameters():
            if parameter.requires_grad:
                write_state(optimizer, parameter, state_of(name))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, in every process."""
        if self.num_processes == 1:
            return tensor
        return self._accelerator.reduce(tensor.to(self.device), "sum").to(tensor.device)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process; all processes get the same result."""
        return self.sum(torch.tensor(int(flag))).item() > 0

    def share(self, rows: int) -> list[int]:
        """Return this process's row indices of a batch: rank, rank + num_processes, and so on.

        Every process gets the same number of rows, because passes may wait for all processes. If
        `rows` is not divisible by the number of processes, the last processes repeat the batch's
        last row. `gather_rows` drops the repetitions.
        """
        number, last = -(-rows // self.num_processes), rows - 1
        return [min(n * self.num_processes + self.rank, last) for n in range(number)]

    def gather_rows(self, share: Tensor, rows: int) -> Tensor:
        """Gather the rows of all processes; return the full batch (rows, ...) in every process.

        `share` holds the rows that the method `share` selects. If its second dimension differs
        between processes, shorter tensors are right-padded with 0.
        """
        if self.num_processes == 1:
            return share
        share = share.to(self.device)
        if share.ndim > 1:
            # Padding turns a bool tensor into integers, so convert it back.
            share = self._accelerator.pad_across_processes(share, dim=1).to(share.dtype)
        by_rank = self._accelerator.gather(share).unflatten(0, (self.num_processes, -1))
        return by_rank.transpose(0, 1).flatten(0, 1)[:rows]

    def gather_record(self, record: Record, rows: int) -> Record:
        """Return a record with `gather_rows` applied to each tensor."""
        return map_tensors(record, partial(self.gather_rows, rows=rows))

    def gather_objects(self, items: list[Item]) -> list[Item]:
        """Return the items of all processes in rank order, in every process."""
        return [item for of_process in self.peers.exchange(items) for item in of_process]
