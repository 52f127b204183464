"""A group of processes that exchange objects and share their errors."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

from ppo_core.errors import PPOError, TrainingError

Result = TypeVar("Result")


def _num_processes() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _alone(item: Any) -> list[Any]:
    return [item]


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """The processes of a run, as seen by one process; by default the run has a single process."""

    rank: int = 0
    """Rank of this process, from 0."""

    number: int = 1
    """Number of processes."""

    exchange: Callable[[Any], list[Any]] = _alone
    """Function that returns the items of all processes in rank order; all must call it together."""

    @classmethod
    def meet(cls, timeout: float) -> "ProcessGroup":
        """Return all processes of the run, connected by a new gloo group; all must call this.

        The group communicates on the CPU, and not over the training's connections, so another
        thread may use the group. A process waits `timeout` seconds for the other processes.
        """
        if _num_processes() == 1:
            return cls()
        return cls._over(
            torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        )

    @classmethod
    def of_training(cls) -> "ProcessGroup":
        """Return all processes of the run, connected by the training's default group."""
        return cls() if _num_processes() == 1 else cls._over(None)

    @classmethod
    def _over(cls, group: "torch.distributed.ProcessGroup | None") -> "ProcessGroup":
        """Return the processes of one of torch's groups; None is the default group."""
        number = _num_processes()

        def exchange(item: Any) -> list[Any]:
            items: list[Any] = [None] * number
            torch.distributed.all_gather_object(items, item, group=group)
            return items

        return cls(rank=torch.distributed.get_rank(), number=number, exchange=exchange)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the process that publishes checkpoints and writes the log."""
        return self.rank == 0

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """Run `work` in every process; return the results of all processes in rank order.

        If `work` raises a PPOError, OSError or ValueError in one process, all processes raise an
        error, so no process waits for a failed one.

        Raises:
            TrainingError: `work` failed in another process, and not in this one.
        """
        try:
            result, failure = work(), None
        except (PPOError, OSError, ValueError) as error:
            result, failure = None, error
        outcomes = self.exchange((result, failure and str(failure)))
        if failure is not None:
            raise failure
        for rank, (_, message) in enumerate(outcomes):
            if message is not None:
                raise TrainingError(f"Process {rank} failed: {message}")
        return [result for result, _ in outcomes]

    def of_main(self, item: Any) -> Any:
        """Return the item of rank 0 in every process."""
        return self.exchange(item)[0]
