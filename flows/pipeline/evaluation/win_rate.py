"""Compute win rates and differences between win rates, with 95 % intervals."""

from collections.abc import Iterable

import numpy as np

from pipeline.evaluation.compare_in_both_orders import POINTS, Comparison, valid_pairs
from pipeline.evaluation.confidence_interval import mean_interval
from pipeline.evaluation.pair_accuracy import Array
from pipeline.results.evaluation import PairedDifference, PeopleAndJudge, SequentialTest, WinRate
from ppo_core.errors import DataError


def measure_win_rate(
    comparison: Comparison,
    *,
    max_invalid: float,
    max_flip_rate: float,
    test: SequentialTest | None = None,
    people: PeopleAndJudge | None = None,
) -> WinRate:
    """Return the candidate's win rate against the opponent, with a 95 % interval.

    The points of a prompt are the mean over its valid pairs, and the rate is the mean over prompts.
    The interval is a confidence sequence (`mean_interval`), which is valid no matter when the judge
    stops.

    Args:
        comparison: pairs judged in both orders.
        max_invalid: maximum fraction of invalid pairs among all pairs for a conclusive rate.
        max_flip_rate: maximum `flip_rate` for a conclusive rate.
        test: how the rate was decided; None for a contest that decides nothing.
        people: the rate from people's labels and the verdicts; None if the labels did not decide.

    Raises:
        DataError: every pair is invalid.
    """
    valid = valid_pairs(comparison)
    values = values_of_prompts(comparison)
    low, high = mean_interval(values, lowest=0.0, highest=1.0)
    reasons = doubts_of(comparison, max_invalid, max_flip_rate)
    return WinRate(
        rate=float(values.mean()),
        low=low,
        high=high,
        n=len(valid),
        wins=comparison.outcomes.count("first"),
        losses=comparison.outcomes.count("second"),
        ties=comparison.outcomes.count("tie"),
        invalid=comparison.outcomes.count("invalid"),
        flip_rate=sum(comparison.flipped) / len(valid),
        conclusive=not reasons,
        reasons=reasons,
        judge=comparison.judge,
        test=test,
        people=people,
    )


def values_of_prompts(comparison: Comparison, *, missing: float | None = None) -> Array:
    """Return the mean points (N,), in [0, 1], of N prompts.

    Pairs of one prompt are not independent, so each prompt counts once. `missing` are the points of
    a pair without a verdict; if None, such pairs are left out.
    """
    points = POINTS if missing is None else {**POINTS, "invalid": missing}
    pairs = zip(comparison.prompts, comparison.outcomes, strict=True)
    return mean_by_prompt(
        (prompt, points[outcome]) for prompt, outcome in pairs if outcome in points
    )


def mean_by_prompt(values: Iterable[tuple[str, float]]) -> Array:
    """Return the mean values (N,) of N different prompts, from (prompt, value) of each pair."""
    by_prompt: dict[str, list[float]] = {}
    for prompt, value in values:
        by_prompt.setdefault(prompt, []).append(value)
    return np.array([np.mean(each) for each in by_prompt.values()])


def describe(win_rate: WinRate) -> str:
    """Return the win rate as text, such as `64.73% (95% CI 53.9-74.6, n=224, judge NAME)`."""
    verdict = "" if win_rate.conclusive else ", inconclusive"
    return (
        f"{win_rate.rate:.2%} (95% CI {100 * win_rate.low:.1f}-{100 * win_rate.high:.1f}, "
        f"n={win_rate.n}, judge {win_rate.judge}{verdict})"
    )


def compare_policies(one: Comparison, other: Comparison) -> PairedDifference:
    """Return the win rate of `one` minus the win rate of `other`, with a 95 % interval.

    The interval is a confidence sequence of the paired differences of the prompts.

    Raises:
        DataError: the comparisons differ in prompts, opponents or judge, or no pair is valid for
            both.
    """
    for name in ("prompts", "opponents", "judge"):
        if getattr(one, name) != getattr(other, name):
            raise DataError(
                f"The two comparisons differ in {name}, so the difference of their win rates "
                f"would not come from the policies alone. Use the same {name} in both comparisons."
            )
    valid = sorted({*valid_pairs(one)} & {*valid_pairs(other)})
    if not valid:
        raise DataError(
            f"The judge {one.judge} gave no verdict for both policies on any of "
            f"{len(one.prompts)} prompts, so the policies cannot be compared. Check that this "
            "judge fits these prompts."
        )
    differences = mean_by_prompt(
        (one.prompts[i], POINTS[one.outcomes[i]] - POINTS[other.outcomes[i]]) for i in valid
    )
    low, high = mean_interval(differences, lowest=-1.0, highest=1.0)
    return PairedDifference(
        difference=float(differences.mean()), low=low, high=high, n=len(valid), judge=one.judge
    )


def doubts_of(comparison: Comparison, max_invalid: float, max_flip_rate: float) -> list[str]:
    """Return why the rate is inconclusive; empty if it is conclusive."""
    total, flips = len(comparison.outcomes), sum(comparison.flipped)
    invalid = comparison.outcomes.count("invalid")
    valid = total - invalid
    doubts = []
    if invalid / total > max_invalid:
        doubts.append(
            f"no verdict for {invalid} of {total} pairs ({invalid / total:.1%}), above "
            f"max_invalid={max_invalid:g}"
        )
    if valid and flips / valid > max_flip_rate:
        doubts.append(
            f"the verdict followed the position in {flips} of {valid} valid pairs "
            f"({flips / valid:.1%}), above max_flip_rate={max_flip_rate:g}"
        )
    return doubts
