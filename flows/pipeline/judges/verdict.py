"""The verdict of a judge on a pair of answers."""

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
    """Probability that the first answer is better; None if the judge gives none."""

    reason: str = ""
    """The judge's reason, or why the verdict is invalid."""

    votes: tuple["Verdict", ...] = ()
    """The verdicts of an ensemble's members, in the order of their names."""


class Judge(Protocol):
    """Compares the two answers of each pair, in the order given."""

    @property
    def name(self) -> str:
        """Name of the judge in every report: the model, and the prompt version if it has one."""
        ...

    @property
    def version(self) -> str:
        """Digest of everything known that decides the verdicts."""
        ...

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the judges of an ensemble; empty for a single judge."""
        ...

    def __call__(self, prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Return one verdict for each prompt and its pair of answers, in order."""
        ...


def swapped(verdict: Verdict) -> Verdict:
    """Return the verdict on the same pair with its answers swapped, votes included."""
    return Verdict(
        winner={"first": "second", "second": "first"}.get(verdict.winner, verdict.winner),
        probability=None if verdict.probability is None else 1 - verdict.probability,
        reason=verdict.reason,
        votes=tuple(map(swapped, verdict.votes)),
    )
