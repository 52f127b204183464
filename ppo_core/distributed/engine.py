"""The processes of a run: which device, which precision, how gradients and sums meet.

With one process every sum is the identity; started by torchrun or `accelerate launch` the same
code is data parallel, or sharded by DeepSpeed's ZeRO or torch's FSDP2.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ppo_core.distributed import deepspeed_engine, fsdp_engine, zero_shards
from ppo_core.distributed.gloo_exit import let_gloo_finish_at_exit
from ppo_core.distributed.optimizer_shards import check_shape, read_state, write_state
from ppo_core.distributed.strategy import Sharding, choose_sharding, fsdp_offloads, uses_deepspeed
from ppo_core.errors import ConfigError, TrainingError
from ppo_core.models.kernels.sparse_embedding_grads import sparse_embedding_grads

Model = TypeVar("Model", bound=nn.Module)
Item = TypeVar("Item")


class Engine:
    """A thin face of accelerate, DeepSpeed and FSDP2.

    What concerns all processes (`prepare`, `backward`, `step`, `sum`, ...) must be called by all
    of them, equally often.
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
        """Join the other processes, if there are any.

        `bf16` computes in bfloat16 by autocast, and the weights stay in fp32; the mixed
        precision of `accelerate launch` says the same. `sharding` None does what `accelerate
        launch` says, else is data parallel where there are several processes. `offload` keeps
        optimizer states on the CPU, and weights too where these are sharded. `deepspeed` is a
        file with DeepSpeed's settings. `gather_for_generation` says whether `gathered` gathers
        all. A process waits `timeout` seconds for the others.

        Raises:
            ConfigError: the settings, DeepSpeed's or those of the launcher contradict each other.
            TrainingError: the launcher started several processes, and they did not find
                each other: each would train alone.
        """
        self._bf16 = bf16 or _launched_precision() == "bf16"
        self._gather_for_generation = gather_for_generation
        self._sharder: Any = None  # DeepSpeed's engine around the module that is trained
        self._frozen: dict[nn.Module, Any] = {}  # and those around models that are not
        chosen = choose_sharding(sharding, deepspeed=deepspeed, offload=offload)
        self._offload = offload or fsdp_offloads()
        on_cpu = use_cpu or not torch.cuda.is_available()
        group = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))
        if chosen is None or uses_deepspeed(chosen):
            self._accelerator = _deepspeed_accelerator(chosen, offload, deepspeed, use_cpu, group)
            chosen = deepspeed_engine.sharding_of(self._accelerator.deepspeed_plugin)
        else:
            if chosen == "fsdp2":
                _join_alone("gloo" if on_cpu else "nccl")
                if self._offload and not on_cpu:
                    group.backend = "cuda:nccl,cpu:gloo"
            self._accelerator = Accelerator(cpu=on_cpu, kwargs_handlers=[group])
        self.sharding: Sharding = chosen
        """How the processes share the work."""
        self._check_connection()
        if torch.distributed.is_initialized():
            let_gloo_finish_at_exit()

    def _check_connection(self) -> None:
        kind = self._accelerator.distributed_type
        if kind == DistributedType.MEGATRON_LM:
            raise ConfigError(
                f"distributed_type={kind.value} of accelerate launch is not supported: nothing "
                "would be sharded as it says. Use FSDP with fsdp_version 2, or DEEPSPEED."
            )
        expected = int(os.environ.get("WORLD_SIZE", "1"))
        # Accelerate can know of the others and still not talk to them: it must say how, too.
        talking = expected == 1 or kind != DistributedType.NO
        if self.num_processes != expected or not talking:
            raise TrainingError(
                f"WORLD_SIZE={expected}, but accelerate found {self.num_processes} processes and "
                f"connects them as {kind}: each would train alone. "
                "Start them with torchrun or accelerate launch."
            )

    @property
    def accelerator(self) -> Accelerator:
        """What accelerate knows of the processes, for scripts that ask it themselves."""
        return self._accelerator

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._accelerator.device

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self._accelerator.process_index

    @property
    def num_processes(self) -> int:
        """Processes in the run."""
        return self._accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files and talks."""
        return self._accelerator.is_main_process

    @property
    def is_deepspeed(self) -> bool:
        """True if DeepSpeed trains what is prepared."""
        return self._accelerator.distributed_type == DistributedType.DEEPSPEED

    @property
    def shards_weights(self) -> bool:
        """True if no process has the weights of what is prepared as a whole."""
        return self.sharding in ("zero3", "fsdp2")

    @property
    def is_plain(self) -> bool:
        """Whether a prepared module is trained by PyTorch alone, in any number of passes."""
        return self.num_processes == 1 and self.sharding in ("none", "ddp")

    def place(self, model: Model) -> Model:
        """A model on the device; where it will be sharded it stays, since it may not fit there."""
        return model if self.shards_weights else model.to(self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Inside, passes compute in the precision of training: for sampling and scoring.

        A prepared module needs none.
        """
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16)

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """The module and its optimizer, ready to be trained by all processes together.

        With one process they are the same objects. The optimizer keeps its groups, so that a
        learning-rate schedule made with it goes on to work. A module can be prepared once.
        """
        self.place(module)
        if self._bf16:
            # Not a wrapper module: the names of the parameters stay.
            module.forward = torch.autocast(self.device.type, torch.bfloat16)(module.forward)
        if self.is_deepspeed:
            if self.sharding == "zero3":
                deepspeed_engine.partition(module, self._accelerator.deepspeed_plugin, self.device)
            self._sharder, _ = self._accelerator.prepare(module, optimizer)
            return self._sharder, optimizer
        if self.sharding == "fsdp2":
            fsdp_engine.shard_trained(module, optimizer, self.device, offload=self._offload)
            return module, optimizer
        if self.num_processes > 1:
            places = [self.device] if self.device.type == "cuda" else None
            return DistributedDataParallel(module, device_ids=places), optimizer
        return module, optimizer

    def prepare_frozen(self, model: Model) -> Model:
        """A model that is not trained: the same object, on the device.

        Where the weights of a prepared module are sharded its are, too.
        """
        model.eval().requires_grad_(False)
        if self.sharding == "zero3":
            plugin = self._accelerator.deepspeed_plugin
            self._frozen[model] = deepspeed_engine.shard_frozen(model, plugin, self.device)
        elif self.sharding == "fsdp2":
            fsdp_engine.shard_frozen(model, self.device, offload=self._offload)
        return self.place(model)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """The module that was prepared; any other as it is."""
        if self.is_deepspeed:
            return deepspeed_engine.unwrap(module)
        return module.module if isinstance(module, DistributedDataParallel) else module

    def accumulate_only(self, module: nn.Module, accumulate: bool) -> AbstractContextManager[None]:
        """Around forward and backward pass: True for all but the last microbatch of a step.

        Gradients may stay local inside.
        """
        if self._sharder is not None:
            self._sharder.set_gradient_accumulation_boundary(not accumulate)
        elif accumulate and isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return nullcontext()

    def learning(self, module: nn.Module) -> AbstractContextManager[None]:
        """Around the microbatches of a step: gradients may take less room inside.

        What shards or averages gradients wants them dense; on a GPU the order of sums would differ
        from run to run.
        """
        can = self.is_plain and self.device.type == "cpu"
        return sparse_embedding_grads(module) if can else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss whose sum over processes and microbatches is minimised.

        Data parallel engines average gradients over processes, hence the factor.
        """
        scaled = loss * self.num_processes
        if self._sharder is not None:
            self._sharder.backward(scaled)
        else:
            scaled.backward()

    def step(self, module: nn.Module, optimizer: Optimizer, max_grad_norm: float) -> Tensor:
        """Clip the gradients to `max_grad_norm`, all together, step, and zero them.

        Returns their norm before. Where that is not finite in one process it is in none, and no
        process takes the step: weights and moments stay as they are.
        """
        if deepspeed_engine.zero_stage(module):
            return deepspeed_engine.step(module, max_grad_norm)
        norm = fsdp_engine.whole(nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm))
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def discard(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Zero the gradients in place of a step: weights and moments stay as they are."""
        if deepspeed_engine.zero_stage(module):
            # Its own optimizer must keep the places of offloaded gradients.
            deepspeed_engine.discard(module)
            return
        optimizer.zero_grad(set_to_none=True)

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Inside, a prepared module is whole in every process: to sample, score and read.

        Its parts may be called one by one, a different number of times in each process, unless
        `passes_meet`. They must not be trained or changed. A module that is not sharded by itself
        is left as it is.
        """
        if fsdp_engine.is_sharded(module):
            return fsdp_engine.gathered(module, layers=self._gather_for_generation)
        sharder = self._frozen.get(module, module)
        if deepspeed_engine.zero_stage(sharder) == 3:
            if self._gather_for_generation:
                return deepspeed_engine.gathered(sharder)
            deepspeed_engine.forget_order(sharder)
        return nullcontext()

    @contextmanager
    def all_gathered(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """The same for several, all at once."""
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(self.gathered(module))
            yield

    def passes_meet(self) -> bool:
        """Whether inside `gathered` each pass still waits for all processes.

        So it is where weights are sharded without `gather_for_generation`: a process that has
        finished its responses must go on with passes until `any` says that none is left.
        """
        return self.shards_weights and not self._gather_for_generation

    def whole_state_dict(self, module: nn.Module) -> dict[str, Tensor] | None:
        """A copy of all parameters and buffers on the CPU in the main process, None elsewhere.

        module is a prepared one, or a part of it. Tensors that are shared (tied embeddings)
        are shared in the copy too.
        """
        tensors = self.unwrap(module).state_dict(keep_vars=True)
        copies: dict[int, Tensor] = {}
        for key, tensor in {id(tensor): tensor for tensor in tensors.values()}.items():
            with deepspeed_engine.gathered_parameter(tensor):
                found = fsdp_engine.whole(tensor.detach())
                if self.is_main:
                    copies[key] = found.to("cpu", copy=True)
        if not self.is_main:
            return None
        return {name: copies[id(tensor)] for name, tensor in tensors.items()}

    @torch.no_grad()
    def load_weights(self, module: nn.Module, weight_of: Callable[[str], Tensor | None]) -> None:
        """Give each parameter the whole tensor that `weight_of` has for its name, to the bit.

        module is a prepared one, trained or frozen, and names are those of its
        `named_parameters()` before it was prepared. Where `weight_of` gives None a parameter
        stays as it is.

        Raises:
            TrainingError: a tensor has another shape than its parameter.
        """
        if deepspeed_engine.zero_stage(module):
            zero_shards.load_weights(module, weight_of)
            return
        fsdp_engine.reshard(module)
        for name, parameter in self.unwrap(module).named_parameters():
            weight = weight_of(name)
            if weight is not None:
                check_shape(name, zero_shards.whole_shape(parameter), weight.shape)
                self._set_whole(parameter, weight)

    @torch.no_grad()
    def copy_weights(self, source: nn.Module, target: nn.Module) -> None:
        """Give each parameter of `target`, a frozen one, the weights of the like-named in `source`.

        Both are prepared ones or parts of them, of the same shapes.
        """
        fsdp_engine.reshard(target)
        sources = dict(source.named_parameters())
        for name, parameter in target.named_parameters():
            with deepspeed_engine.gathered_parameter(sources[name]):
                self._set_whole(parameter, fsdp_engine.whole(sources[name].detach()))

    def _set_whole(self, parameter: nn.Parameter, weight: Tensor) -> None:
        if self.sharding == "fsdp2":
            parameter.copy_(fsdp_engine.sharded_like(weight, parameter))
        else:
            zero_shards.set_weight(parameter, weight)

    def optimizer_states(
        self, module: nn.Module, optimizer: Optimizer
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Name and state of each trained parameter: whole tensors, in every process.

        The state is what the optimizer keeps for it (exp_avg, exp_avg_sq, step, ...), empty
        before the first step. Numbers are tensors of int64 or float64 without dimensions. What
        is whole already is not copied. All processes must take all items.

        Raises:
            TrainingError: the optimizer keeps something else than tensors and numbers.
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
        """Put back what `optimizer_states` gave, by the parameters' names, to the bit.

        Raises:
            TrainingError: under ZeRO, a tensor has another shape than its parameter.
        """
        if deepspeed_engine.zero_stage(module):
            zero_shards.load_optimizer_states(module, state_of)
            return
        for name, parameter in self.unwrap(module).named_parameters():
            if parameter.requires_grad:
                write_state(optimizer, parameter, state_of(name))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same in each."""
        if self.num_processes == 1:
            return tensor
        return self._accelerator.reduce(tensor.to(self.device), "sum").to(tensor.device)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process, the same in each."""
        return self.sum(torch.tensor(int(flag))).item() > 0

    def share(self, rows: int) -> list[int]:
        """The rows of a batch that are this process's: rank, rank + processes, and so on.

        All have equally many, since their passes may meet: where the last ones would have one
        less they have the batch's last row once more, which `gather_rows` leaves out.
        """
        number, last = -(-rows // self.num_processes), rows - 1
        return [min(n * self.num_processes + self.rank, last) for n in range(number)]

    def gather_rows(self, share: Tensor, rows: int) -> Tensor:
        """The whole batch (rows, ...) in every process, from the shares of all.

        Shares may differ in the width of their second dimension, if they have one; the narrower
        ones are filled up with 0 on the right.
        """
        if self.num_processes == 1:
            return share
        share = share.to(self.device)
        if share.ndim > 1:
            # Padding makes whole numbers of what is True or False.
            share = self._accelerator.pad_across_processes(share, dim=1).to(share.dtype)
        by_rank = self._accelerator.gather(share).unflatten(0, (self.num_processes, -1))
        return by_rank.transpose(0, 1).flatten(0, 1)[:rows]

    def gather_objects(self, items: list[Item]) -> list[Item]:
        """The items of all processes, in the order of their ranks, in every process."""
        return gather_object(items) if self.num_processes > 1 else items


def _launched_precision() -> str:
    """What `accelerate launch` says of mixed precision.

    Raises:
        ConfigError: it is none that is supported.
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
    _join_alone(group.backend)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[group])
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise ConfigError(
            "Accelerate left out DeepSpeed, because it was told to stay on the CPU. Start without "
            "--cpu or use_cpu; without a GPU DeepSpeed takes the CPU by itself."
        )
    deepspeed_engine.build_models_whole()
    return accelerator


def _join_alone(backend: str) -> None:
    """Make a process group of this process, where no launcher did: what shards needs one."""
    if "LOCAL_RANK" not in os.environ and not torch.distributed.is_initialized():
        os.environ["LOCAL_RANK"] = "0"
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
