"""What a judge says about a pair of answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

WINNERS = ("first", "second", "tie", "invalid")


@dataclass(frozen=True)
class Verdict:
    """Which of two answers to a prompt is better."""

    winner: str
    """`first`, `second`, `tie`, or `invalid` where the judge gave no verdict."""

    probability: float | None = None
    """Probability that the first answer is the better one, where the judge knows it."""

    reason: str = ""
    """What the judge said, or why its verdict is invalid."""

    votes: tuple["Verdict", ...] = ()
    """The verdicts of an ensemble's members, in the order of their names."""


class Judge(Protocol):
    """Compares pairs of answers, each in the order in which they are given."""

    @property
    def name(self) -> str:
        """Who judges, as every figure shows it: the model, and the prompt if it reads one."""
        ...

    @property
    def version(self) -> str:
        """Digest of all that decides its verdicts, as far as it can be known."""
        ...

    @property
    def members(self) -> tuple[str, ...]:
        """Names of an ensemble's judges; empty for one judge."""
        ...

    def __call__(self, prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """One verdict for each prompt and its pair of answers, in their order."""
        ...


def swapped(verdict: Verdict) -> Verdict:
    """The verdict in the words of the pair in its other order; of a vote likewise."""
    return Verdict(
        winner={"first": "second", "second": "first"}.get(verdict.winner, verdict.winner),
        probability=None if verdict.probability is None else 1 - verdict.probability,
        reason=verdict.reason,
        votes=tuple(map(swapped, verdict.votes)),
    )
