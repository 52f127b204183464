"""Growth of cost with batch, length, vocabulary, model and padding."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scipy.stats import linregress

from tests.benchmarks.cases import NEOX_10M, Shape, Workload, neox
from tests.benchmarks.compare import alternate, task_of
from tests.benchmarks.models import all_parameters, save_models
from tests.benchmarks.tasks import Run

BASE = Workload(
    shape=neox("scaling", vocabulary=8_000, width=128, layers=4, heads=4),
    accumulation=2,
    response_length=32,
)
FACTORS = (1, 2, 4)


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the k of cost = c size^k, by least squares of the logarithms."""
    logs = ([math.log(size) for size in sizes], [math.log(cost) for cost in costs])
    return float(linregress(*logs).slope)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The cost of workloads of increasing size."""

    what: str
    sizes: Sequence[float]
    seconds: Sequence[float]
    """Seconds per episode."""

    bytes: Sequence[int]
    """Peak memory above that of the imports."""


def workloads_that_grow() -> dict[str, list[tuple[float, Workload]]]:
    """Return sizes and workloads, by the name of the size that grows."""
    shape = BASE.shape
    return {
        "batch": [(BASE.batch * f, replace(BASE, accumulation=2 * f)) for f in FACTORS],
        "response tokens": [
            (BASE.response_length * f, replace(BASE, response_length=BASE.response_length * f))
            for f in FACTORS
        ],
        "vocabulary": [
            (shape.vocabulary * f, _with_shape(replace(shape, vocabulary=shape.vocabulary * f)))
            for f in FACTORS
        ],
        "layers": [
            (shape.layers * f, _with_shape(replace(shape, layers=shape.layers * f)))
            for f in FACTORS
        ],
    }


def _with_shape(shape: Shape) -> Workload:
    return replace(BASE, shape=shape)


def measure_alone(workloads: Sequence[Workload], folder: Path, *, rounds: int) -> list[Run]:
    """Measure our updates of several workloads, in alternation."""
    tasks = []
    for number, workload in enumerate(workloads):
        models = folder / str(number)
        save_models(workload, models)
        tasks.append(task_of(workload, models, side="ours"))
    return alternate(tasks, warmups=1, rounds=rounds)


def median_seconds(run: Run, *phases: str) -> float:
    """Return the median over a run's updates of the summed seconds of phases."""
    return statistics.median(sum(getattr(u, phase) for phase in phases) for u in run.updates)


def measure_growth(folder: Path, *, rounds: int) -> list[Growth]:
    """Measure our time and memory as each of four sizes grows."""
    found = []
    for what, steps in workloads_that_grow().items():
        sizes, workloads = zip(*steps, strict=True)
        runs = measure_alone(workloads, folder / what.replace(" ", "-"), rounds=rounds)
        found.append(
            Growth(
                what=what,
                sizes=sizes,
                seconds=[median_seconds(run, "seconds") / run.task.batch for run in runs],
                bytes=[run.bytes_above_imports for run in runs],
            )
        )
    return found


# --- Padding: one long sequence among short ones ---

RESPONSE = 16
SHORT, LONG, SHORT_ROWS = 20, 400, 32


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Runs of two batches with equal numbers of tokens: unequal and equal sequence lengths."""

    unequal: Run
    equal: Run

    def ratio(self, *phases: str) -> float:
        """Return unequal over equal, of the median seconds of phases."""
        return median_seconds(self.unequal, *phases) / median_seconds(self.equal, *phases)


def measure_padding(folder: Path, *, rounds: int) -> Padding:
    """Measure 32 sequences of 20 tokens and one of 400 against 33 of the mean length."""
    rows, total = SHORT_ROWS + 1, SHORT_ROWS * SHORT + LONG
    unequal = [SHORT] * SHORT_ROWS + [LONG]
    equal = [total // rows + (number < total % rows) for number in range(rows)]
    workloads = [
        Workload(
            shape=NEOX_10M,
            microbatch=11,
            accumulation=3,
            response_length=RESPONSE,
            prompt_lengths=tuple(length - RESPONSE for length in lengths),
        )
        for lengths in (unequal, equal)
    ]
    runs = measure_alone(workloads, folder, rounds=rounds)
    return Padding(unequal=runs[0], equal=runs[1])


# --- Memory: the vocabulary doubled ---


@dataclass(frozen=True, kw_only=True)
class VocabularyMemory:
    """Peak memory above imports, weights, gradients and optimizer states."""

    vocabularies: Sequence[int]
    state_bytes: Sequence[int]
    peak_bytes: Sequence[int]
    """Peak memory above the imports."""

    def above(self) -> list[int]:
        """Return the bytes of activations, caches and logits."""
        return [p - s for p, s in zip(self.peak_bytes, self.state_bytes, strict=True)]


def measure_memory(folder: Path) -> VocabularyMemory:
    """Measure one update with the vocabulary of the 10M model, and with twice that vocabulary."""
    shapes = [replace(NEOX_10M, vocabulary=NEOX_10M.vocabulary * f) for f in (1, 2)]
    runs = measure_alone([Workload(shape=shape) for shape in shapes], folder, rounds=1)
    return VocabularyMemory(
        vocabularies=[shape.vocabulary for shape in shapes],
        state_bytes=[state_bytes(*all_parameters(shape)) for shape in shapes],
        peak_bytes=[run.bytes_above_imports for run in runs],
    )


def state_bytes(policy: int, critic: int) -> int:
    """Return bytes of fp32 weights, gradients and AdamW states, from numbers of weights.

    Policy and critic have all of them; reference and reward model have weights alone.
    """
    return 4 * (4 * policy + 4 * critic + policy + critic)
