"""Two policies' answers, compared by a judge in both orders."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeline.judges.verdict import Judge, Verdict, swapped
from ppo_core.errors import DataError

POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}
"""What each outcome is worth to the candidate; an invalid pair is worth nothing to anybody."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Pairs of answers and what a judge said about each in both orders."""

    prompts: tuple[str, ...]
    """What was answered."""

    candidates: tuple[str, ...]
    """The answers of the policy in question, the first of each straight pair."""

    opponents: tuple[str, ...]
    """The answers that they are compared with."""

    straight: tuple[Verdict, ...]
    """Verdicts on candidate and opponent, in this order."""

    swapped: tuple[Verdict, ...]
    """Verdicts on opponent and candidate, in the words of the straight pair."""

    judge: str
    """Who judged."""

    members: tuple[str, ...] = ()
    """The judges of an ensemble, in the order of each verdict's votes."""

    @cached_property
    def outcomes(self) -> tuple[str, ...]:
        """`first` or `second` where both orders agree, `tie` where they do not; or `invalid`."""
        return tuple(
            _agree(one.winner, other.winner)
            for one, other in zip(self.straight, self.swapped, strict=True)
        )

    @cached_property
    def flipped(self) -> tuple[bool, ...]:
        """Where the judge named the same position in both orders: it followed the position."""
        return tuple(
            {one.winner, other.winner} == {"first", "second"}
            for one, other in zip(self.straight, self.swapped, strict=True)
        )


def compare(
    judge: Judge, prompts: Sequence[str], candidates: Sequence[str], opponents: Sequence[str]
) -> Comparison:
    """Ask a judge about all pairs of answers to the same prompts, then about all swapped."""
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
    """Numbers of the pairs that have an outcome.

    Raises:
        DataError: none has one.
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
    """Why a verdict is invalid, of the first one that says so."""
    for verdict in (*comparison.straight, *comparison.swapped):
        if verdict.winner == "invalid" and verdict.reason:
            return f"The first was: {verdict.reason}"
    return "None has a reason."


def _agree(one: str, other: str) -> str:
    if "invalid" in (one, other):
        return "invalid"
    return one if one == other else "tie"
