"""Ours and TRL, update by update in turns, on the same models and prompts."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.benchmarks.cases import Case, Workload
from tests.benchmarks.floor import episode_flops
from tests.benchmarks.models import linear_parameters, make_prompts
from tests.benchmarks.processes import TRL_PYTHON, Worker
from tests.benchmarks.tasks import SIDES, Run, Side, Task, Update


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Two tasks that took turns: the updates of the same number are a pair."""

    title: str
    ours: Run
    theirs: Run

    def ratios(self) -> list[float]:
        """Our episodes a second over theirs, pair by pair."""
        return [
            self.ours.episodes_per_second(n) / self.theirs.episodes_per_second(n)
            for n in range(len(self.ours.updates))
        ]

    @property
    def ratio(self) -> float:
        """Their median."""
        return statistics.median(self.ratios())

    @property
    def memory_ratio(self) -> float:
        """Our peak over theirs."""
        return self.ours.peak_bytes / self.theirs.peak_bytes


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was measured of one case."""

    case: Case
    pairings: Sequence[Pairing]
    seconds: float
    """That it took, the processes' start included."""

    def episode_flops(self, run: Run) -> float:
        """Floating-point operations of the linear layers in an episode of a run's mean length."""
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
    """The task of one process for a workload whose models are saved."""
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
    resident: bool = True,
    trl_python: Path = TRL_PYTHON,
) -> list[Run]:
    """Run the tasks in turns, an update each, `rounds` times; the measured updates of each.

    All processes stay alive and wait meanwhile. Where they do not fit beside each other (a GPU)
    they are not `resident`: each turn is then a process of its own.
    """
    updates: list[list[Update]] = [[] for _ in tasks]
    if not resident:
        for _ in range(rounds):
            for task, own in zip(tasks, updates, strict=True):
                with _started([task], warmups, 1, trl_python) as workers:
                    own.append(workers[0].run_update())
    else:
        with _started(tasks, warmups, rounds, trl_python) as workers:
            for _ in range(rounds):
                for worker, own in zip(workers, updates, strict=True):
                    own.append(worker.run_update())
    return [Run(task=task, updates=own) for task, own in zip(tasks, updates, strict=True)]


@contextmanager
def _started(
    tasks: Sequence[Task], warmups: int, rounds: int, trl_python: Path
) -> Iterator[list[Worker]]:
    """Processes that wait for their first measured update."""
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
    """All pairings of a case: TRL as it ships against ours in fp32 and at its best, and both with
    oneDNN's fp32 products.
    """

    def task(side: Side, **settings: Any) -> Task:
        return task_of(case.workload, models, side=side, **settings)

    tasks = [task("trl"), task("ours")] + [task("ours", best=True)] * case.has_best
    theirs, ours, *best = alternate(
        tasks, warmups=case.warmups, rounds=pairs, trl_python=trl_python
    )
    pairings = [Pairing(title="fp32, TRL as it ships", ours=ours, theirs=theirs)]
    if case.precision_rounds:
        tasks = [task("ours", precision="medium"), task("trl", precision="medium")]
        runs = alternate(
            tasks, warmups=case.warmups, rounds=case.precision_rounds, trl_python=trl_python
        )
        pairings.append(Pairing(title="fp32, both by oneDNN", ours=runs[0], theirs=runs[1]))
    pairings += [Pairing(title="our best, TRL as it ships", ours=b, theirs=theirs) for b in best]
    return pairings


def compare_gpu(case: Case, models: Path, *, pairs: int, trl_python: Path) -> list[Pairing]:
    """Both in bfloat16 on the GPU, one process at a time: two do not fit into its memory."""
    tasks = [task_of(case.workload, models, side=side, device="cuda", bf16=True) for side in SIDES]
    ours, theirs = alternate(
        tasks, warmups=case.warmups, rounds=pairs, resident=False, trl_python=trl_python
    )
    return [Pairing(title="both bf16", ours=ours, theirs=theirs)]
