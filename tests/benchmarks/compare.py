"""Ours against TRL on the same models and prompts, in alternating updates."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppo_core.config.placement import is_fast_in_bf16
from tests.benchmarks.cases import Case, Workload
from tests.benchmarks.floor import episode_flops
from tests.benchmarks.models import linear_parameters, make_prompts
from tests.benchmarks.processes import TRL_PYTHON, Worker
from tests.benchmarks.tasks import Run, Side, Task, Update

AS_SHIPPED = "each as it ships"


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Two tasks with alternating updates: updates of the same number are a pair."""

    title: str
    ours: Run
    theirs: Run

    def ratios(self) -> list[float]:
        """Return our episodes per second over TRL's, pair by pair."""
        return [
            self.ours.episodes_per_second(n) / self.theirs.episodes_per_second(n)
            for n in range(len(self.ours.updates))
        ]

    @property
    def ratio(self) -> float:
        """Return the median of `ratios`."""
        return statistics.median(self.ratios())

    @property
    def memory_ratio(self) -> float:
        """Return our peak memory over TRL's."""
        return self.ours.peak_bytes / self.theirs.peak_bytes


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The measurements of one case."""

    case: Case
    pairings: Sequence[Pairing]
    seconds: float
    """Wall time of the comparison, with the start of the processes."""

    def episode_flops(self, run: Run) -> float:
        """Return FLOPs of the linear layers in an episode of the run's mean length."""
        workload = self.case.workload
        backbone, head = linear_parameters(workload.shape)
        prompts = make_prompts(workload)
        return episode_flops(
            backbone=backbone,
            head=head,
            prompt_tokens=statistics.mean(map(len, prompts)),
            response_tokens=run.mean_tokens,
            epochs=workload.epochs,
        )


def task_of(workload: Workload, models: Path, *, side: Side, **settings: Any) -> Task:
    """Return the task of one process; the workload's models must be saved in `models`."""
    return Task(
        side=side,
        models=str(models),
        microbatch=workload.microbatch,
        accumulation=workload.accumulation,
        epochs=workload.epochs,
        response_length=workload.response_length,
        ends_early=workload.mean_length is not None,
        **settings,
    )


def alternate(
    tasks: Sequence[Task],
    *,
    warmups: int,
    rounds: int,
    trl_python: Path = TRL_PYTHON,
) -> list[Run]:
    """Run one update of each task in alternation, `rounds` times; return the measured updates."""
    updates: list[list[Update]] = [[] for _ in tasks]
    with _started(tasks, warmups, rounds, trl_python) as workers:
        for _ in range(rounds):
            for worker, own in zip(workers, updates, strict=True):
                own.append(worker.run_update())
    return [Run(task=task, updates=own) for task, own in zip(tasks, updates, strict=True)]


@contextmanager
def _started(
    tasks: Sequence[Task], warmups: int, rounds: int, trl_python: Path
) -> Iterator[list[Worker]]:
    """Start the processes and run their warmups; kill the processes on exit."""
    with ExitStack() as stack:
        tasks = [replace(task, updates=warmups + rounds) for task in tasks]
        workers = [stack.enter_context(Worker(task, trl_python=trl_python)) for task in tasks]
        for worker in workers:
            worker.wait_until_ready()
        for worker in workers:
            for _ in range(warmups):
                worker.run_update()
        yield workers


def compare_cpu(case: Case, models: Path, *, pairs: int, trl_python: Path) -> list[Pairing]:
    """Compare both sides as they ship, and in fp32 if ours computes in bfloat16 on this machine.

    TRL computes in fp32 on a CPU.
    """

    def task(side: Side, **settings: Any) -> Task:
        return task_of(case.workload, models, side=side, **settings)

    in_bf16 = is_fast_in_bf16(case.workload.shape.width, use_cpu=True)
    tasks = [task("trl"), task("ours"), *[task("ours", bf16=False)] * in_bf16]
    theirs, *ours = alternate(tasks, warmups=case.warmups, rounds=pairs, trl_python=trl_python)
    titles = (AS_SHIPPED, "fp32") if in_bf16 else (f"{AS_SHIPPED}, fp32",)
    return [
        Pairing(title=title, ours=run, theirs=theirs)
        for title, run in zip(titles, ours, strict=True)
    ]


def compare_gpu(case: Case, models: Path, *, pairs: int, trl_python: Path) -> list[Pairing]:
    """Compare in bfloat16 on the GPU, with passes of a microbatch and of the whole batch.

    One process runs after the other: memory has no room for two.
    """

    def run(side: Side, workload: Workload) -> Run:
        task = task_of(workload, models, side=side, device="cuda", bf16=True)
        (measured,) = alternate([task], warmups=case.warmups, rounds=pairs, trl_python=trl_python)
        return measured

    given = case.workload
    whole = replace(given, microbatch=given.batch, accumulation=1)
    return [
        Pairing(
            title=f"both bf16, passes of {workload.microbatch}",
            ours=run("ours", workload),
            theirs=run("trl", workload),
        )
        for workload in (given, whole)
    ]
