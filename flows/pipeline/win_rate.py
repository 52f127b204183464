"""Verdicts to a win rate: both orders of every pair, ties, and an interval."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from statsmodels.stats.proportion import proportion_confint

from ppo_core.errors import DataError

Judge = Callable[[Sequence[str], Sequence[tuple[str, str]]], list[str]]
"""Prompts and pairs of answers to verdicts: first, second, tie or invalid."""


@dataclass(frozen=True)
class WinRate:
    """How often one policy's answers beat the other's."""

    rate: float
    """Share of the valid pairs that it won, a tie counted as half."""

    low: float
    """Lower end of the 95 % interval (Wilson)."""

    high: float
    """Upper end of the 95 % interval (Wilson)."""

    n: int
    """Valid pairs."""

    ties: int
    """Valid pairs without a winner, or with another winner in the other order."""

    invalid: int
    """Pairs for which the judge gave no verdict in one order or both; not in `n`."""

    judge: str
    """Who judged."""


def measure_win_rate(
    judge: Judge,
    judge_name: str,
    prompts: Sequence[str],
    candidates: Sequence[str],
    opponents: Sequence[str],
    *,
    max_invalid: float,
) -> WinRate:
    """How often `candidates` beat `opponents`, answers to the same prompts.

    Every pair is shown in both orders. It is won or lost only if both verdicts agree,
    and a tie otherwise, so a judge that prefers a position counts for neither side.

    Raises:
        DataError: more than `max_invalid` of the pairs have no verdict.
    """
    straight = judge(prompts, list(zip(candidates, opponents, strict=True)))
    swapped = judge(prompts, list(zip(opponents, candidates, strict=True)))
    outcomes = [
        _agree(one, _seen_straight(other)) for one, other in zip(straight, swapped, strict=True)
    ]
    invalid = outcomes.count("invalid")
    if invalid > max_invalid * len(outcomes) or invalid == len(outcomes):
        raise DataError(
            f"The judge {judge_name} gave no verdict for {invalid} of {len(outcomes)} pairs; up "
            f"to evaluation.max_invalid={max_invalid:.0%} are left out of the rate. Check that "
            "this judge fits these prompts."
        )
    n = len(outcomes) - invalid
    ties = outcomes.count("tie")
    wins = outcomes.count("first") + ties / 2
    low, high = proportion_confint(wins, n, alpha=0.05, method="wilson")
    return WinRate(wins / n, float(low), float(high), n, ties, invalid, judge_name)


def _seen_straight(verdict: str) -> str:
    """The verdict of a swapped pair in the words of the straight one."""
    return {"first": "second", "second": "first"}.get(verdict, verdict)


def _agree(one: str, other: str) -> str:
    if "invalid" in (one, other):
        return "invalid"
    return one if one == other else "tie"
