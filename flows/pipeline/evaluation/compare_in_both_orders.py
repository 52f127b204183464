"""Let a judge compare the answers of two policies, each pair in both orders."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipeline.judges.verdict import Judge, JudgedPrompt, Verdict, swapped
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.errors import DataError

CONTESTS = (("sft", "reference"), ("ppo", "reference"), ("ppo", "sft"), ("ppo", "champion"))
"""Candidate and opponent of each contest. A contest compares two sets of answers to the same
prompts. A run without references or champion has fewer contests, see `contests_between`."""

POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}
"""Points of the candidate by outcome; the outcome `invalid` gives no points."""

PROMPTS_AT_ONCE = 16
"""Number of prompts per batch. If the budget ends in a batch, the earlier batches count."""

_COLUMNS = ("prompts", "candidates", "opponents", "straight", "swapped")
"""Fields of a comparison that have one item per pair."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Pairs of answers, and a judge's verdicts on each pair in both orders.

    All fields but `judge` and `members` have one item per pair.
    """

    prompts: tuple[str, ...]
    """Prompt of each pair, as `shown_prompt` returns it."""

    candidates: tuple[str, ...]
    """Answers of the candidate."""

    opponents: tuple[str, ...]
    """Answers of the opponent."""

    straight: tuple[Verdict, ...]
    """Verdicts when the candidate's answer is shown first; `first` means the candidate."""

    swapped: tuple[Verdict, ...]
    """Verdicts when the opponent's answer is shown first. They are already swapped back: here too,
    `first` means the candidate."""

    judge: str
    """Name of the judge."""

    members: tuple[str, ...] = ()
    """Names of the judges of an ensemble, in the order of `Verdict.votes`; empty for one judge."""

    @cached_property
    def outcomes(self) -> tuple[str, ...]:
        """Outcome per pair: the winner if the verdicts on both orders agree, otherwise `tie`.

        The outcome is `invalid` if the verdict on either order is invalid.
        """
        return tuple(
            _agree(one.winner, other.winner)
            for one, other in zip(self.straight, self.swapped, strict=True)
        )

    @cached_property
    def flipped(self) -> tuple[bool, ...]:
        """Per pair: whether the judge chose the same position in both orders."""
        return tuple(
            {one.winner, other.winner} == {"first", "second"}
            for one, other in zip(self.straight, self.swapped, strict=True)
        )


def contests_between(contestants: Collection[str]) -> list[tuple[str, str]]:
    """Return the items of CONTESTS whose candidate and opponent are both among the contestants."""
    return [contest for contest in CONTESTS if {*contest} <= {*contestants}]


def compare(
    judge: Judge,
    prompts: Sequence[JudgedPrompt],
    candidates: Sequence[str],
    opponents: Sequence[str],
) -> Comparison:
    """Ask a judge about two answers to each prompt, in both orders."""
    straight = judge(prompts, list(zip(candidates, opponents, strict=True)))
    back = judge(prompts, list(zip(opponents, candidates, strict=True)))
    return Comparison(
        prompts=tuple(map(shown_prompt, prompts)),
        candidates=tuple(candidates),
        opponents=tuple(opponents),
        straight=tuple(straight),
        swapped=tuple(map(swapped, back)),
        judge=judge.name,
        members=tuple(judge.members),
    )


def first_pairs(comparison: Comparison, count: int) -> Comparison:
    """Return the first `count` pairs of a comparison."""
    return replace(comparison, **{name: getattr(comparison, name)[:count] for name in _COLUMNS})


def joined(parts: Sequence[Comparison], positions: Sequence[int]) -> Comparison:
    """Join several comparisons by one judge, and sort their pairs by position.

    `positions` has the position of each pair, in the order of `parts`.
    """
    order = sorted(range(len(positions)), key=positions.__getitem__)
    columns: dict[str, Any] = {}
    for name in _COLUMNS:
        pairs = [pair for part in parts for pair in getattr(part, name)]
        columns[name] = tuple(pairs[number] for number in order)
    return replace(parts[0], **columns)


def valid_pairs(comparison: Comparison) -> list[int]:
    """Return the indices of the pairs whose outcome is not `invalid`.

    Raises:
        DataError: every outcome is `invalid`.
    """
    outcomes = comparison.outcomes
    valid = [number for number, outcome in enumerate(outcomes) if outcome != "invalid"]
    if not valid:
        raise DataError(
            f"The judge {comparison.judge} gave no verdict for {len(outcomes)} of "
            f"{len(outcomes)} pairs, so there is no win rate. Check that this judge "
            f"fits these prompts. {first_reason(comparison)}"
        )
    return valid


def first_reason(comparison: Comparison) -> str:
    """Return a sentence with the reason of the first invalid verdict that has one."""
    for verdict in (*comparison.straight, *comparison.swapped):
        if verdict.winner == "invalid" and verdict.reason:
            return f"The first invalid verdict has this reason: {verdict.reason}"
    return "No invalid verdict has a reason."


def _agree(one: str, other: str) -> str:
    if "invalid" in (one, other):
        return "invalid"
    return one if one == other else "tie"
