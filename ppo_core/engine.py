"""The processes of a run: which device, which precision, how gradients and sums meet.

With one process every sum is the identity; started by torchrun or `accelerate launch` the same
code is data parallel, and with DeepSpeed's settings it is sharded by ZeRO.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ppo_core import engine_deepspeed
from ppo_core.errors import ConfigError, TrainingError

Model = TypeVar("Model", bound=nn.Module)
Item = TypeVar("Item")


class Engine:
    """A thin face of accelerate, with or without DeepSpeed.

    What concerns all processes (`prepare`, `backward`, `step`, `sum`, ...) must be called by all
    of them, equally often.
    """

    def __init__(
        self,
        *,
        bf16: bool = False,
        use_cpu: bool = False,
        deepspeed: str | None = None,
        gather_for_generation: bool = True,
    ) -> None:
        """Join the other processes, if there are any.

        `bf16` computes in bfloat16 by autocast, and the weights stay in fp32; the mixed
        precision of `accelerate launch` says the same. `deepspeed` is a file with DeepSpeed's
        settings; None takes those of `accelerate launch`, if any. `gather_for_generation` says
        whether `gathered` gathers.

        Raises:
            ConfigError: DeepSpeed's settings or those of the launcher cannot be taken.
            TrainingError: the launcher started several processes, and they did not find
                each other: each would train alone.
        """
        self._bf16 = bf16 or _launched_precision() == "bf16"
        self._gather_for_generation = gather_for_generation
        self._sharder: Any = None  # DeepSpeed's engine around the module that is trained
        if deepspeed is not None or engine_deepspeed.is_launched():
            self._accelerator = _deepspeed_accelerator(deepspeed, use_cpu)
        else:
            self._accelerator = Accelerator(cpu=use_cpu or not torch.cuda.is_available())
        self._check_connection()

    def _check_connection(self) -> None:
        kind = self._accelerator.distributed_type
        if kind in (DistributedType.FSDP, DistributedType.MEGATRON_LM):
            raise ConfigError(
                f"distributed_type={kind.value} of accelerate launch is not supported: nothing "
                "would be sharded as it says. Use DEEPSPEED with zero_stage 3."
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
        module.to(self.device)
        if self._bf16:
            # Not a wrapper module: the names of the parameters stay.
            module.forward = torch.autocast(self.device.type, torch.bfloat16)(module.forward)
        if self.is_deepspeed:
            self._sharder, _ = self._accelerator.prepare(module, optimizer)
            return self._sharder, optimizer
        if self.num_processes > 1:
            places = [self.device] if self.device.type == "cuda" else None
            return DistributedDataParallel(module, device_ids=places), optimizer
        return module, optimizer

    def prepare_frozen(self, model: Model) -> Model:
        """A model that is not trained, on the device and whole in every process."""
        return model.eval().to(self.device)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """The module that was prepared; any other as it is."""
        if self.is_deepspeed:
            return engine_deepspeed.unwrap(module)
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
        if engine_deepspeed.zero_stage(module):
            return engine_deepspeed.step(module, max_grad_norm)
        norm = nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def discard(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Zero the gradients in place of a step: weights and moments stay as they are."""
        if engine_deepspeed.zero_stage(module):
            engine_deepspeed.discard(module)
        optimizer.zero_grad(set_to_none=True)

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Inside, a prepared module is whole in every process: to sample, score and read.

        Its parts may be called one by one, a different number of times in each process. They
        must not be trained or changed.
        """
        if engine_deepspeed.zero_stage(module) == 3 and self._gather_for_generation:
            return engine_deepspeed.gathered(module)
        return nullcontext()

    def passes_meet(self, module: nn.Module) -> bool:
        """Whether inside `gathered` each pass still waits for all processes.

        So it is under ZeRO-3 without `gather_for_generation`: a process that has finished its
        responses must go on with passes until `any` says that none is left.
        """
        return engine_deepspeed.zero_stage(module) == 3 and not self._gather_for_generation

    def whole_state_dict(self, module: nn.Module) -> dict[str, Tensor] | None:
        """A copy of all parameters and buffers on the CPU in the main process, None elsewhere.

        module is a prepared one, or a part of it. Tensors that are shared (tied embeddings)
        are shared in the copy too.
        """
        tensors = self.unwrap(module).state_dict(keep_vars=True)
        copies: dict[int, Tensor] = {}
        for key, tensor in {id(tensor): tensor for tensor in tensors.values()}.items():
            with engine_deepspeed.gathered_parameter(tensor):
                if self.is_main:
                    copies[key] = tensor.detach().to("cpu", copy=True)
        if not self.is_main:
            return None
        return {name: copies[id(tensor)] for name, tensor in tensors.items()}

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same in each."""
        if self.num_processes == 1:
            return tensor
        return self._accelerator.reduce(tensor.to(self.device), "sum").to(tensor.device)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process, the same in each."""
        return self.sum(torch.tensor(int(flag))).item() > 0

    def gather_objects(self, items: list[Item]) -> list[Item]:
        """The items of all processes, in the order of their ranks, in every process."""
        return gather_object(items) if self.num_processes > 1 else items

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self._accelerator.wait_for_everyone()


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


def _deepspeed_accelerator(settings_path: str | None, use_cpu: bool) -> Accelerator:
    has_gpu = torch.cuda.is_available()
    if use_cpu and has_gpu:
        raise ConfigError(
            "use_cpu=True with DeepSpeed on a machine with a GPU: DeepSpeed would take the GPU. "
            "Hide it with CUDA_VISIBLE_DEVICES='' instead."
        )
    plugin = engine_deepspeed.make_plugin(settings_path)
    backend = "nccl" if has_gpu else "gloo"
    engine_deepspeed.join_alone(backend)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)]
    )
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise ConfigError(
            "Accelerate left out DeepSpeed, because it was told to stay on the CPU. Start without "
            "--cpu or use_cpu; without a GPU DeepSpeed takes the CPU by itself."
        )
    engine_deepspeed.build_models_whole()
    return accelerator
