"""Device, precision, sharding and collectives of a run, in one or several processes.

In one process every collective is the identity. Started by torchrun or `accelerate launch`, the
same code is data parallel, or sharded by DeepSpeed's ZeRO or PyTorch's FSDP2.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ppo_core.distributed import deepspeed_engine, fsdp_engine, zero_shards
from ppo_core.distributed.accelerator import launched_precision, make_accelerator
from ppo_core.distributed.optimizer_shards import check_shape, read_state, write_state
from ppo_core.distributed.process import let_gloo_finish_at_exit
from ppo_core.distributed.process_group import ProcessGroup
from ppo_core.distributed.strategy import Sharding, choose_sharding, fsdp_offloads
from ppo_core.models.kernels.sparse_embedding_grads import sparse_embedding_grads

Model = TypeVar("Model", bound=nn.Module)
Item = TypeVar("Item")


class Engine:
    """A small interface to accelerate, DeepSpeed and FSDP2.

    All processes must call the collective methods (`prepare`, `backward`, `step`, `sum`, ...), in
    the same order.
    """

    def __init__(
        self,
        *,
        bf16: bool = False,
        use_cpu: bool = False,
        sharding: Sharding | None = None,
        offload: bool = False,
        deepspeed: str | None = None,
        gather_for_generation: bool = True,
        timeout: int = 1800,
    ) -> None:
        """Join the other processes of the run.

        Args:
            bf16: compute in bfloat16 by autocast; weights stay in fp32. The mixed precision of
                `accelerate launch` has the same effect.
            use_cpu: do not use a GPU.
            sharding: None follows `accelerate launch`; without it, it means data parallel in
                several processes and no sharding in one.
            offload: keep optimizer states on the CPU, and weights too where they are sharded.
            deepspeed: path of a JSON file with DeepSpeed's settings.
            gather_for_generation: let `gathered` gather all layers at once.
            timeout: seconds that a process waits for the others.

        Raises:
            ConfigError: these settings, DeepSpeed's or the launcher's contradict each other.
            TrainingError: the launcher started several processes that are not connected: each
                would train alone.
        """
        self._bf16 = bf16 or launched_precision() == "bf16"
        self._gather_for_generation = gather_for_generation
        self._offload = offload or fsdp_offloads()
        self._deepspeed: Any = None  # DeepSpeed's engine around the trained module
        self._frozen: dict[nn.Module, Any] = {}  # its engines around frozen models
        self._accelerator, self.sharding = make_accelerator(
            choose_sharding(sharding, deepspeed=deepspeed, offload=offload),
            settings_path=deepspeed,
            offload=self._offload,
            use_cpu=use_cpu,
            timeout=timeout,
        )
        self.peers = ProcessGroup.of_training()
        """All processes of the run, over the connections that the training uses."""
        # Registered here and not in a command: a user's own script that makes an Engine over gloo
        # could otherwise abort at its exit.
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
        """Whether this process writes the files and the log: rank 0."""
        return self._accelerator.is_main_process

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed trains the prepared module."""
        return self._accelerator.distributed_type == DistributedType.DEEPSPEED

    @property
    def shards_weights(self) -> bool:
        """Whether each process holds only its shard of a prepared module's weights."""
        return self.sharding in ("zero3", "fsdp2")

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch trains a prepared module in one process, in any number of passes."""
        return self.num_processes == 1 and self.sharding in ("none", "ddp")

    def place(self, model: Model) -> Model:
        """Move a model to the device, unless it will be sharded: it may not fit there in full."""
        return model if self.shards_weights else model.to(self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which forward passes compute in the precision of training.

        It is for sampling and scoring: a prepared module applies autocast by itself.
        """
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16)

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return the module and its optimizer, ready to be trained by all processes together.

        With one process both are the same objects. The optimizer keeps its groups, so a
        learning-rate schedule that was made for it stays valid. A module can be prepared once.
        """
        self.place(module)
        if self._bf16:
            # No wrapper module, which would change the names of the parameters.
            module.forward = torch.autocast(self.device.type, torch.bfloat16)(module.forward)
        if self.is_deepspeed:
            if self.sharding == "zero3":
                deepspeed_engine.partition(module, self._accelerator.deepspeed_plugin, self.device)
            self._deepspeed, _ = self._accelerator.prepare(module, optimizer)
            return self._deepspeed, optimizer
        if self.sharding == "fsdp2":
            fsdp_engine.shard_trained(module, optimizer, self.device, offload=self._offload)
            return module, optimizer
        if self.num_processes > 1:
            devices = [self.device] if self.device.type == "cuda" else None
            return DistributedDataParallel(module, device_ids=devices), optimizer
        return module, optimizer

    def prepare_frozen(self, model: Model) -> Model:
        """Freeze a model and move it to the device; return the same object.

        It is sharded where the weights of a prepared module are.
        """
        model.eval().requires_grad_(False)
        if self.sharding == "zero3":
            plugin = self._accelerator.deepspeed_plugin
            self._frozen[model] = deepspeed_engine.initialize_frozen(model, plugin, self.device)
        elif self.sharding == "fsdp2":
            fsdp_engine.shard_frozen(model, self.device, offload=self._offload)
        return self.place(model)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the module inside DeepSpeed's or DDP's wrapper, or the module itself."""
        if self.is_deepspeed:
            return deepspeed_engine.unwrap(module)
        return module.module if isinstance(module, DistributedDataParallel) else module

    def accumulate_only(self, module: nn.Module, accumulate: bool) -> AbstractContextManager[None]:
        """Return a context for the forward and backward pass of one microbatch.

        accumulate is True for all but the last microbatch of a step: gradients may then stay
        local.
        """
        if self._deepspeed is not None:
            self._deepspeed.set_gradient_accumulation_boundary(not accumulate)
        elif accumulate and isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return nullcontext()

    def learning(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context for the microbatches of a step, in which gradients may be sparse.

        They stay dense with several processes, since DDP and the sharded engines need them so, and
        on a GPU, where the order of sums would differ from run to run.
        """
        can = self.is_plain and self.device.type == "cpu"
        return sparse_embedding_grads(module) if can else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss whose sum over processes and microbatches is minimized.

        The loss is multiplied by the number of processes, because data parallel engines average
        gradients over them.
        """
        scaled = loss * self.num_processes
        if self._deepspeed is not None:
            self._deepspeed.backward(scaled)
        else:
            scaled.backward()

    def step(self, module: nn.Module, optimizer: Optimizer, max_grad_norm: float) -> Tensor:
        """Clip the global gradient norm to `max_grad_norm`, step, and zero the gradients.

        Return the norm before clipping, which is the same in all processes. If it is not finite,
        no process takes the step: weights and moments stay as they are.
        """
        if deepspeed_engine.zero_stage(module):
            return deepspeed_engine.step(module, max_grad_norm)
        norm = fsdp_engine.unsharded(nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm))
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def discard(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Zero the gradients without a step: weights and moments stay as they are."""
        if deepspeed_engine.zero_stage(module):
            # DeepSpeed's optimizer must keep its buffers of offloaded gradients.
            deepspeed_engine.discard(module)
            return
        optimizer.zero_grad(set_to_none=True)

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which a prepared module is unsharded, to sample, score and read.

        Its submodules may be called one by one, a different number of times in each process
        unless `passes_meet`. They must not be trained or changed. A module that is not the root
        of a sharded one is left as it is.
        """
        if fsdp_engine.is_sharded(module):
            return fsdp_engine.gathered(module, layers=self._gather_for_generation)
        sharder = self._frozen.get(module, module)
        if deepspeed_engine.zero_stage(sharder) == 3:
            if self._gather_for_generation:
                return deepspeed_engine.gathered_module(sharder)
            deepspeed_engine.forget_order(sharder)
        return nullcontext()

    @contextmanager
    def all_gathered(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Enter `gathered` for several modules at once."""
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(self.gathered(module))
            yield

    def passes_meet(self) -> bool:
        """Return whether each pass inside `gathered` still waits for all processes.

        It does where weights are sharded and `gather_for_generation` is off: a process that has
        finished its responses must continue with passes until `any` returns False.
        """
        return self.shards_weights and not self._gather_for_generation

    def full_state_dict(self, module: nn.Module) -> dict[str, Tensor] | None:
        """Copy all parameters and buffers, unsharded, to the CPU of the main process.

        The other processes return None. module is a prepared one or a submodule of it. Tied
        tensors (embeddings) are tied in the copy too.
        """
        tensors = self.unwrap(module).state_dict(keep_vars=True)
        copies: dict[int, Tensor] = {}
        for key, tensor in {id(tensor): tensor for tensor in tensors.values()}.items():
            with deepspeed_engine.gathered_parameter(tensor):
                found = fsdp_engine.unsharded(tensor.detach())
                if self.is_main:
                    copies[key] = found.to("cpu", copy=True)
        if not self.is_main:
            return None
        return {name: copies[id(tensor)] for name, tensor in tensors.items()}

    @torch.no_grad()
    def load_weights(self, module: nn.Module, weight_of: Callable[[str], Tensor | None]) -> None:
        """Copy the unsharded tensor `weight_of(name)` into each parameter, bit for bit.

        module is a prepared one, trained or frozen, and the names are those of its
        `named_parameters()` before it was prepared. A parameter stays as it is where `weight_of`
        returns None.

        Raises:
            TrainingError: a tensor and its parameter differ in shape.
        """
        if deepspeed_engine.zero_stage(module):
            zero_shards.load_weights(module, weight_of)
            return
        fsdp_engine.reshard(module)
        for name, parameter in self.unwrap(module).named_parameters():
            weight = weight_of(name)
            if weight is not None:
                check_shape(name, zero_shards.full_shape(parameter), weight.shape)
                self._set_full(parameter, weight)

    @torch.no_grad()
    def copy_weights(self, source: nn.Module, target: nn.Module) -> None:
        """Copy each parameter of `source` into the parameter of the same name of a frozen `target`.

        Both are prepared modules or submodules of them, with the same shapes.
        """
        fsdp_engine.reshard(target)
        sources = dict(source.named_parameters())
        for name, parameter in target.named_parameters():
            with deepspeed_engine.gathered_parameter(sources[name]):
                self._set_full(parameter, fsdp_engine.unsharded(sources[name].detach()))

    def _set_full(self, parameter: nn.Parameter, weight: Tensor) -> None:
        if self.sharding == "fsdp2":
            parameter.copy_(fsdp_engine.sharded_like(weight, parameter))
        else:
            zero_shards.set_weight(parameter, weight)

    def optimizer_states(
        self, module: nn.Module, optimizer: Optimizer
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield name and optimizer state of each trained parameter, unsharded, in every process.

        The state (exp_avg, exp_avg_sq, step, ...) is empty before the first step. Plain numbers
        become 0-dimensional tensors of int64 or float64. Tensors that are not sharded are not
        copied. All processes must take all items.

        Raises:
            TrainingError: the state holds a value that is neither a tensor nor a number.
        """
        if deepspeed_engine.zero_stage(module):
            yield from zero_shards.optimizer_states(module)
            return
        for name, parameter in self.unwrap(module).named_parameters():
            if parameter.requires_grad:
                yield name, read_state(optimizer, parameter)

    @torch.no_grad()
    def load_optimizer_states(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        state_of: Callable[[str], dict[str, Tensor]],
    ) -> None:
        """Restore the states that `optimizer_states` returned, by parameter name, bit for bit.

        Raises:
            TrainingError: under ZeRO, a tensor and its parameter differ in shape.
        """
        if deepspeed_engine.zero_stage(module):
            zero_shards.load_optimizer_states(module, state_of)
            return
        for name, parameter in self.unwrap(module).named_parameters():
            if parameter.requires_grad:
                write_state(optimizer, parameter, state_of(name))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes, the same in each."""
        if self.num_processes == 1:
            return tensor
        return self._accelerator.reduce(tensor.to(self.device), "sum").to(tensor.device)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process, the same in each."""
        return self.sum(torch.tensor(int(flag))).item() > 0

    def share(self, rows: int) -> list[int]:
        """Return this process's row indices of a batch: rank, rank + processes, and so on.

        Every process has the same number of rows, since their passes may wait for each other. The
        last processes repeat the batch's last row where the division leaves a remainder;
        `gather_rows` drops the repetitions.
        """
        number, last = -(-rows // self.num_processes), rows - 1
        return [min(n * self.num_processes + self.rank, last) for n in range(number)]

    def gather_rows(self, share: Tensor, rows: int) -> Tensor:
        """Gather the shares of all processes; return the full batch (rows, ...) in each.

        Shares may differ in the size of their second dimension; shorter ones are right-padded
        with 0.
        """
        if self.num_processes == 1:
            return share
        share = share.to(self.device)
        if share.ndim > 1:
            # Padding turns a bool tensor into integers.
            share = self._accelerator.pad_across_processes(share, dim=1).to(share.dtype)
        by_rank = self._accelerator.gather(share).unflatten(0, (self.num_processes, -1))
        return by_rank.transpose(0, 1).flatten(0, 1)[:rows]

    def gather_objects(self, items: list[Item]) -> list[Item]:
        """Return the items of all processes in the order of their ranks, in every process."""
        return [item for of_process in self.peers.exchange(items) for item in of_process]
