"""Comparison of two policies' answers by a judge, in both orders."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeline.judges.verdict import Judge, Verdict, swapped
from ppo_core.errors import DataError

POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}
"""Points of the candidate by outcome; an invalid pair has none."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Pairs of answers, and a judge's verdicts on each in both orders."""

    prompts: tuple[str, ...]
    """The prompts of the answers."""

    candidates: tuple[str, ...]
    """Answers of the candidate, the first of each straight pair."""

    opponents: tuple[str, ...]
    """Answers that the candidate's are compared with."""

    straight: tuple[Verdict, ...]
    """Verdicts on (candidate, opponent)."""

    swapped: tuple[Verdict, ...]
    """Verdicts on (opponent, candidate), in the order of the straight pair."""

    judge: str
    """Name of the judge."""

    members: tuple[str, ...] = ()
    """Names of the judges of an ensemble, in the order of each verdict's votes."""

    @cached_property
    def outcomes(self) -> tuple[str, ...]:
        """`first` or `second` if both orders agree, `tie` if they differ, or `invalid`."""
        return tuple(
            _agree(one.winner, other.winner)
            for one, other in zip(self.straight, self.swapped, strict=True)
        )

    @cached_property
    def flipped(self) -> tuple[bool, ...]:
        """Where the judge named the same position in both orders, by pair."""
        return tuple(
            {one.winner, other.winner} == {"first", "second"}
            for one, other in zip(self.straight, self.swapped, strict=True)
        )


def compare(
    judge: Judge, prompts: Sequence[str], candidates: Sequence[str], opponents: Sequence[str]
) -> Comparison:
    """Ask a judge about all pairs of answers to the same prompts, in both orders."""
    straight = judge(prompts, list(zip(candidates, opponents, strict=True)))
    back = judge(prompts, list(zip(opponents, candidates, strict=True)))
    return Comparison(
        prompts=tuple(prompts),
        candidates=tuple(candidates),
        opponents=tuple(opponents),
        straight=tuple(straight),
        swapped=tuple(map(swapped, back)),
        judge=judge.name,
        members=tuple(judge.members),
    )


def valid_pairs(comparison: Comparison) -> list[int]:
    """Return the indices of the pairs that have an outcome.

    Raises:
        DataError: no pair has an outcome.
    """
    outcomes = comparison.outcomes
    valid = [number for number, outcome in enumerate(outcomes) if outcome != "invalid"]
    if not valid:
        raise DataError(
            f"The judge {comparison.judge} gave no verdict for {len(outcomes)} of "
            f"{len(outcomes)} pairs, so nothing can be said about them. Check that this judge "
            f"fits these prompts. {_first_reason(comparison)}"
        )
    return valid


def _first_reason(comparison: Comparison) -> str:
    """Return the first reason that an invalid verdict has."""
    for verdict in (*comparison.straight, *comparison.swapped):
        if verdict.winner == "invalid" and verdict.reason:
            return f"The first was: {verdict.reason}"
    return "None has a reason."


def _agree(one: str, other: str) -> str:
    if "invalid" in (one, other):
        return "invalid"
    return one if one == other else "tie"
