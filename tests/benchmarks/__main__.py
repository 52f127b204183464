"""`python -m tests.benchmarks`: measure, and print the tables; see --help."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks import estimators, flow_overhead, growth, tables
from tests.benchmarks.cases import (
    CASES,
    GPU_CASE,
    LLAMA_42M,
    NEOX_0_9M,
    NEOX_10M,
    PYTHIA_31M,
    Case,
    Workload,
)
from tests.benchmarks.compare import Comparison, Pairing, compare_cpu, compare_gpu
from tests.benchmarks.floor import measured_rates
from tests.benchmarks.job import jobs_table, measure_jobs
from tests.benchmarks.machine import machine_lines
from tests.benchmarks.models import save_models
from tests.benchmarks.processes import TRL_PYTHON, MeasurementError, run_python
from tests.benchmarks.results import Headline, write_results
from tests.benchmarks.trainings import measure_trainings

THREADS = 2
SAMPLED_TOKENS = 53
WIDTH = 180
"""Characters of the widest table."""

NO_GPU = 2
"""Exit code without a CUDA device."""


Measured = tuple[Table, list[Headline]]
"""The table of a case, and its rows of the summary."""


def sampling(folder: Path, rounds: int) -> Table:
    """Return the table of our sampling against `generate`, for each model."""
    shapes = (NEOX_0_9M, NEOX_10M, PYTHIA_31M, LLAMA_42M)
    for shape in shapes:
        save_models(Workload(shape=shape), folder / shape.name)
    models = [str(folder / shape.name) for shape in shapes]
    printed = run_python("measure_sampling", str(SAMPLED_TOKENS), str(rounds), *models)
    # Earlier lines may be from libraries.
    seconds = json.loads(printed.splitlines()[-1])
    return tables.sampling_table(seconds, SAMPLED_TOKENS)


def trainings(kind: str, folder: Path, rounds: int, trl_python: Path) -> Measured:
    """Measure a kind of supervised training against TRL's, for each model."""
    found = measure_trainings(kind, folder, rounds=rounds, trl_python=trl_python)
    what = {"sft": "SFT", "reward": "reward-model training"}[kind]
    headlines = [
        Headline(what=what, model=one.shape.name, ratios=one.ratios, memory=one.memory_ratio)
        for one in found
        if one.setting == "shipped"
    ]
    return tables.trainings_table(kind, found), headlines


def job(folder: Path, rounds: int, trl_python: Path) -> Measured:
    """Measure the whole job against TRL's trainers."""
    jobs = measure_jobs(folder, rounds=rounds, trl_python=trl_python)
    headline = Headline(what="the whole job", model=NEOX_10M.name, ratios=jobs.ratios)
    return jobs_table(jobs), [headline]


BESIDE_TRL: dict[str, Callable[[Path, int, Path], Measured]] = {
    "sft": partial(trainings, "sft"),
    "reward": partial(trainings, "reward"),
    "job": job,
}

EXTRAS: dict[str, Callable[[Path, int], Table]] = {
    "sampling": sampling,
    "padding": lambda folder, rounds: tables.padding_table(
        growth.measure_padding(folder, rounds=rounds)
    ),
    "estimators": lambda folder, rounds: tables.estimators_table(
        estimators.measure_estimators(folder, rounds=rounds)
    ),
    "memory": lambda folder, rounds: tables.memory_table(growth.measure_memory(folder)),
    "growth": lambda folder, rounds: tables.growth_table(
        growth.measure_growth(folder, rounds=rounds)
    ),
    "flow": lambda folder, rounds: flow_overhead.flow_table(flow_overhead.measure_flow(folder)),
}
"""Measurements without TRL."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line: cases, number of pairs and output file."""
    names = [case.name for case in CASES] + [*BESIDE_TRL, *EXTRAS]
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=names,
        metavar="NAME",
        help=f"the beginnings of names; all are {' '.join(names)}",
    )
    parser.add_argument("--pairs", type=int, default=3, help="alternating pairs of updates")
    parser.add_argument("--gpu", action="store_true", help="compare on CUDA, and nothing else")
    parser.add_argument(
        "--trl-python", type=Path, default=TRL_PYTHON, help="the interpreter that has TRL"
    )
    parser.add_argument("--results", type=Path, help="write RESULTS.md there")
    chosen = parser.parse_args(arguments)
    unknown = [given for given in chosen.cases if not any(n.startswith(given) for n in names)]
    if unknown:
        parser.error(f"no case begins with {' or '.join(unknown)}; all are {' '.join(names)}")
    return chosen


def measure_on_cpu(chosen: argparse.Namespace) -> Iterator[Measured]:
    """Yield the table and the headlines of each chosen case as soon as it is measured."""
    rates = measured_rates("cpu", threads=THREADS)
    yield tables.rates_table(rates), []

    def wanted(name: str) -> bool:
        return any(name.startswith(given) for given in chosen.cases)

    for case in CASES:
        if wanted(case.name):
            comparison = compared(case, partial(compare_cpu, case, **how_often(chosen)))
            shipped = comparison.pairings[0]
            headline = Headline(
                what="PPO update",
                model=case.name,
                ratios=shipped.ratios(),
                memory=shipped.memory_ratio,
            )
            yield tables.comparison_table(comparison, rates), [headline]
    for name in [*BESIDE_TRL, *EXTRAS]:
        if wanted(name):
            started = time.monotonic()
            with tempfile.TemporaryDirectory() as scratch:
                folder, rounds = Path(scratch), chosen.pairs
                if name in EXTRAS:
                    table, headlines = EXTRAS[name](folder, rounds), []
                else:
                    table, headlines = BESIDE_TRL[name](folder, rounds, chosen.trl_python)
            table.title = f"{table.title} ({time.monotonic() - started:.0f} s)"
            yield table, headlines


def how_often(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of every comparison."""
    return {"pairs": chosen.pairs, "trl_python": chosen.trl_python}


def compared(case: Case, measure: Callable[[Path], list[Pairing]]) -> Comparison:
    """Save a case's models, compare both sides, and delete the models."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        save_models(case.workload, Path(folder))
        pairings = measure(Path(folder))
    return Comparison(case=case, pairings=pairings, seconds=time.monotonic() - started)


def measure_on_gpu(chosen: argparse.Namespace) -> Iterator[Measured]:
    """Yield the tables of the comparison on CUDA."""
    rates = measured_rates("cuda", threads=THREADS)
    yield tables.rates_table(rates), []
    comparison = compared(GPU_CASE, partial(compare_gpu, GPU_CASE, **how_often(chosen)))
    yield tables.comparison_table(comparison, rates), []


def main(arguments: Sequence[str]) -> int:
    """Measure and print; return the exit code."""
    chosen = parse_arguments(arguments)
    console = Console(width=max(WIDTH, Console().width))
    if chosen.gpu and not torch.cuda.is_available():
        console.print(
            "There is no CUDA device here, and nothing was measured. `make bench` "
            "measures on the CPU."
        )
        return NO_GPU
    lines = machine_lines()
    console.print("\n".join(lines), highlight=False)
    found, headlines = [], []
    try:
        for table, own in measure_on_gpu(chosen) if chosen.gpu else measure_on_cpu(chosen):
            console.print(table)
            found.append(table)
            headlines += own
    except MeasurementError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    if chosen.results:
        write_results(chosen.results, lines, headlines, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
