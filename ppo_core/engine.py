"""The processes of a run: which device, how gradients and sums meet.

The only file that imports accelerate. With one process every sum is the identity; started by
torchrun or `accelerate launch` the same code is data parallel.
"""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ppo_core.errors import TrainingError


class Engine:
    """A thin face of accelerate's Accelerator."""

    def __init__(self) -> None:
        """Join the other processes, if there are any.

        Raises:
            TrainingError: the launcher started several processes, and they did not find
                each other: each would train alone.
        """
        self._accelerator = Accelerator(cpu=not torch.cuda.is_available())
        expected = int(os.environ.get("WORLD_SIZE", "1"))
        # Accelerate can know of the others and still not talk to them: it must say how, too.
        talking = expected == 1 or self._accelerator.distributed_type != DistributedType.NO
        if self.num_processes != expected or not talking:
            raise TrainingError(
                f"WORLD_SIZE={expected}, but accelerate found {self.num_processes} processes and "
                f"connects them as {self._accelerator.distributed_type}: each would train alone. "
                "Start them with torchrun or accelerate launch."
            )

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

    def prepare(self, module: nn.Module) -> nn.Module:
        """The module, its gradients averaged over the processes."""
        if self.num_processes == 1:
            return module
        return self._accelerator.prepare(module)

    def accumulate_only(self, module: nn.Module, accumulate: bool) -> AbstractContextManager[None]:
        """Inside, gradients stay local if `accumulate`: for all but the last microbatch."""
        if accumulate and self.num_processes > 1:
            return self._accelerator.no_sync(module)
        return nullcontext()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same in each."""
        return self._accelerator.reduce(tensor, "sum") if self.num_processes > 1 else tensor

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss whose sum over processes is what is minimised.

        Data parallel engines average gradients, hence the factor.
        """
        self._accelerator.backward(loss * self.num_processes)

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients down to `max_norm` together; returns their norm before."""
        return self._accelerator.clip_grad_norm_(parameters, max_norm)
