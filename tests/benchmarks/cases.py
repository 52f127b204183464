"""What is measured: shapes of models, and what they are asked to do."""

from dataclasses import dataclass, replace
from typing import Literal

Family = Literal["gpt_neox", "llama"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a model; policy, reference, critic and reward model have the same."""

    name: str
    family: Family
    vocabulary: int
    width: int
    layers: int
    heads: int
    intermediate: int

    @property
    def tied(self) -> bool:
        """Whether the head is the matrix of the embeddings."""
        return self.family == "llama"


def neox(name: str, *, vocabulary: int, width: int, layers: int, heads: int) -> Shape:
    """A GPT-NeoX with the usual intermediate size."""
    return Shape(
        name=name,
        family="gpt_neox",
        vocabulary=vocabulary,
        width=width,
        layers=layers,
        heads=heads,
        intermediate=4 * width,
    )


NEOX_0_9M = neox("neox-0.9m", vocabulary=5_000, width=64, layers=6, heads=4)
NEOX_10M = neox("neox-10m", vocabulary=16_000, width=192, layers=8, heads=6)
PYTHIA_31M = neox("neox-31m", vocabulary=50_304, width=256, layers=6, heads=8)
PYTHIA_1B = neox("pythia-1b", vocabulary=50_304, width=2_048, layers=16, heads=8)
LLAMA_42M = Shape(
    name="llama-42m",
    family="llama",
    vocabulary=32_000,
    width=512,
    layers=8,
    heads=8,
    intermediate=1_376,
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One PPO step; the same for both sides."""

    shape: Shape
    microbatch: int = 8
    """Responses in one forward and backward pass."""

    accumulation: int = 4
    """Such passes before an optimizer step; their product is the batch."""

    epochs: int = 4
    response_length: int = 53
    mean_length: float | None = None
    """Mean length of the responses that end early; None lets all run to `response_length`."""

    prompt_lengths: tuple[int, ...] | None = None
    """Tokens of each prompt of the batch; None draws them from 32 to 96."""

    @property
    def batch(self) -> int:
        """Episodes of one update."""
        return self.microbatch * self.accumulation


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload that both sides are compared on."""

    workload: Workload
    has_best: bool = False
    """Whether our best setting is measured too."""

    warmups: int = 1
    """Updates of each process before the measured ones. The large models have none: theirs take
    half a minute, beside which a first touch of memory is nothing."""

    precision_rounds: int = 1
    """Pairs with oneDNN's matrix products on both sides; 0 leaves them out."""

    @property
    def name(self) -> str:
        """The model and how its responses end."""
        return f"{self.workload.shape.name}-{'early' if self.workload.mean_length else 'full'}"


def _cases() -> tuple[Case, ...]:
    small, middle = Workload(shape=NEOX_0_9M), Workload(shape=NEOX_10M)
    pythia, llama = Workload(shape=PYTHIA_31M), Workload(shape=LLAMA_42M)
    return (
        Case(workload=small, precision_rounds=3),
        Case(workload=middle, precision_rounds=2),
        Case(workload=replace(middle, mean_length=26), precision_rounds=0),
        Case(workload=pythia, has_best=True, warmups=0),
        Case(workload=replace(pythia, mean_length=26), warmups=0, precision_rounds=0),
        Case(workload=llama, has_best=True, warmups=0),
    )


CASES = _cases()
GPU_CASE = Case(workload=Workload(shape=PYTHIA_1B, accumulation=8), precision_rounds=0)
