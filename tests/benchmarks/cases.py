"""The measured cases: model shapes and workloads."""

from dataclasses import dataclass, replace
from typing import Literal

Family = Literal["gpt_neox", "llama"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of policy, reference, critic and reward model alike."""

    name: str
    family: Family
    vocabulary: int
    width: int
    layers: int
    heads: int
    intermediate: int

    @property
    def tied(self) -> bool:
        """Whether the LM head shares the weights of the embedding."""
        return self.family == "llama"


def neox(name: str, *, vocabulary: int, width: int, layers: int, heads: int) -> Shape:
    """Return the shape of a GPT-NeoX whose MLP is four times as wide as its states."""
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
LLAMA_135M = Shape(
    name="llama-135m",
    family="llama",
    vocabulary=49_152,
    width=576,
    layers=30,
    heads=9,
    intermediate=1_536,
)
"""The shape of SmolLM2-135M, without its grouped keys and values."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One PPO step, the same for both sides."""

    shape: Shape
    microbatch: int = 8
    """Responses in one forward and backward pass."""

    accumulation: int = 4
    """Microbatches per optimizer step; microbatch * accumulation is the batch."""

    epochs: int = 4
    response_length: int = 53
    mean_length: float | None = None
    """Mean response length with a stop token; None: every response has `response_length` tokens."""

    prompt_lengths: tuple[int, ...] | None = None
    """Tokens of each prompt in the batch; None draws lengths from 32 to 96."""

    @property
    def batch(self) -> int:
        """Episodes in one update."""
        return self.microbatch * self.accumulation


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload for the comparison of both sides."""

    workload: Workload
    warmups: int = 1
    """Updates of each process before the measured ones. Large models have none: an update takes
    half a minute, and a warmup would save little of it."""

    @property
    def name(self) -> str:
        """Return the case's name: the model, and whether responses end early."""
        return f"{self.workload.shape.name}-{'early' if self.workload.mean_length else 'full'}"


def _cases() -> tuple[Case, ...]:
    small, middle = Workload(shape=NEOX_0_9M), Workload(shape=NEOX_10M)
    pythia, llama = Workload(shape=PYTHIA_31M), Workload(shape=LLAMA_42M)
    return (
        Case(workload=small),
        Case(workload=middle),
        Case(workload=replace(middle, mean_length=26)),
        Case(workload=pythia, warmups=0),
        Case(workload=replace(pythia, mean_length=26), warmups=0),
        Case(workload=llama, warmups=0),
        Case(workload=Workload(shape=LLAMA_135M, accumulation=1), warmups=0),
    )


CASES = _cases()
GPU_CASE = Case(workload=Workload(shape=PYTHIA_1B, accumulation=8))
