"""The processes that write and read a checkpoint together."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed
from safetensors import SafetensorError

from ppo_core.errors import PPOError, TrainingError

Result = TypeVar("Result")


def _alone(item: Any) -> list[Any]:
    return [item]


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """The processes of a run, as one of them sees the others; without arguments it is alone."""

    rank: int = 0
    """Number of this process, from 0."""

    number: int = 1
    """How many there are."""

    exchange: Callable[[Any], list[Any]] = _alone
    """The items of all processes, in the order of their ranks; all must call it."""

    @classmethod
    def meet(cls, timeout: float) -> "ProcessGroup":
        """All processes of the run, over connections of their own; all must call it.

        So they can talk from a thread while the training talks over its own, and on the CPU. A
        process waits `timeout` seconds for the others.
        """
        number = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if number == 1:
            return cls()
        group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

        def exchange(item: Any) -> list[Any]:
            items: list[Any] = [None] * number
            torch.distributed.all_gather_object(items, item, group=group)
            return items

        return cls(rank=torch.distributed.get_rank(), number=number, exchange=exchange)

    @property
    def is_main(self) -> bool:
        """True in the one process that puts the checkpoint into place and talks."""
        return self.rank == 0

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """What each process's work gives; what one raises is raised in all of them.

        So nobody waits for a process that has failed.
        """
        try:
            result, failure = work(), None
        except (PPOError, OSError, SafetensorError, ValueError) as error:
            result, failure = None, error
        outcomes = self.exchange((result, failure and str(failure)))
        if failure is not None:
            raise failure
        for rank, (_, words) in enumerate(outcomes):
            if words is not None:
                raise TrainingError(f"Process {rank} says: {words}")
        return [result for result, _ in outcomes]

    def of_main(self, item: Any) -> Any:
        """The main process's item, in every process."""
        return self.exchange(item)[0]
