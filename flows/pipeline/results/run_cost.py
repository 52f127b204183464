"""The cost of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.judges.judge_budget import Spent


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Cost of all attempts of a step. Prices are in US dollars."""

    attempts: int
    seconds: float

    gpus: int
    """Number of GPUs of all machines in the last attempt."""

    gpu_seconds: float
    cpu_seconds: float

    price: float | None
    """Price of the GPUs; None if the price of a GPU is unknown."""


@dataclass(frozen=True, kw_only=True)
class JudgeCost(Spent):
    """Cost of a judge that asks a server."""

    price: float | None
    """Price of the tokens; None if the number of tokens or their price is unknown."""


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Numbers of tokens that PPO sampled and trained on."""

    sampled: int
    trained: int


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Cost of a run so far."""

    steps: dict[str, StepCost]
    """Costs by name of the step."""

    gpu_hours: float
    tokens: TokenCounts

    judges: dict[str, JudgeCost]
    """Costs by name of the judge."""

    price: float | None
    """Price of all steps and judges; None if a part is unknown."""

    @property
    def judge_calls(self) -> int:
        """Number of calls of all judges."""
        return sum(judge.calls for judge in self.judges.values())

    @property
    def judge_tokens(self) -> float | None:
        """Number of tokens of all judges; None if a server did not report its tokens."""
        return sum_if_known([judge.tokens for judge in self.judges.values()])


def sum_if_known(parts: Sequence[float | None]) -> float | None:
    """Return the sum of the parts; None if one of them is None."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
