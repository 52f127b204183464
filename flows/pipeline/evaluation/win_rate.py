"""From outcomes to a win rate with its interval, and to the difference of two policies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap, wilcoxon
from statsmodels.stats.proportion import proportion_confint

from pipeline.evaluation.comparison import POINTS, Comparison, valid_pairs
from ppo_core.errors import DataError

RESAMPLES = 4_999
"""Bootstrap resamples of the prompts for an interval."""

DRAWN_AT_ONCE = 1_000_000
"""Maximum number of prompts in a batch of resamples; it bounds the memory to tens of MB."""


@dataclass(frozen=True, kw_only=True)
class WinRate:
    """How often the candidate's answers beat the opponent's."""

    rate: float
    """Share of the valid pairs that the candidate won, a tie counted as half."""

    low: float
    """Lower end of the 95 % interval."""

    high: float
    """Upper end of the 95 % interval."""

    n: int
    """Valid pairs."""

    wins: int
    """Valid pairs won in both orders."""

    losses: int
    """Valid pairs lost in both orders."""

    ties: int
    """Valid pairs without a winner, or with different winners in the two orders."""

    invalid: int
    """Pairs without a verdict in one order or both; not in `n`."""

    flip_rate: float
    """Share of the valid pairs whose verdict followed the position."""

    conclusive: bool
    """Whether the shares of invalid and of flipped pairs are within their limits."""

    reasons: list[str]
    """Why the rate is inconclusive; empty if it is conclusive."""

    judge: str
    """Name of the judge."""


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """How much more often one policy wins than another, on the same prompts."""

    difference: float
    """Rate of the first policy minus that of the second, over the pairs valid for both."""

    low: float
    """Lower end of the 95 % interval."""

    high: float
    """Upper end of the 95 % interval."""

    p_value: float
    """p-value of Wilcoxon's signed-rank test that the policies are equal."""

    n: int
    """Pairs valid for both policies."""

    judge: str
    """Name of the judge."""


def measure_win_rate(
    comparison: Comparison, *, max_invalid: float, max_flip_rate: float, seed: int
) -> WinRate:
    """Return how often the candidate beats the opponent, with a 95 % interval.

    The interval is a percentile bootstrap over prompts: all answers to one prompt are resampled
    together. If every prompt has the same rate (all wins, all ties, a single prompt), all resamples
    are equal; the interval is then Wilson's, with one trial a prompt.

    Args:
        comparison: the pairs, judged in both orders.
        max_invalid: the rate is inconclusive if a larger share of all pairs has no verdict.
        max_flip_rate: the rate is inconclusive if a larger share of the valid pairs is flipped.
        seed: seed of the resamples.

    Raises:
        DataError: no pair has a verdict.
    """
    valid = valid_pairs(comparison)
    points = np.array([POINTS[comparison.outcomes[number]] for number in valid])
    low, high = _interval([comparison.prompts[number] for number in valid], points, seed)
    reasons = _doubts(comparison, max_invalid, max_flip_rate)
    return WinRate(
        rate=float(points.mean()),
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
    )


def describe(win_rate: WinRate) -> str:
    """Return the rate as text: `64.70% (95% CI 61.7-67.6, n=1000, judge NAME)`."""
    verdict = "" if win_rate.conclusive else ", inconclusive"
    return (
        f"{win_rate.rate:.2%} (95% CI {100 * win_rate.low:.1f}-{100 * win_rate.high:.1f}, "
        f"n={win_rate.n}, judge {win_rate.judge}{verdict})"
    )


def compare_policies(one: Comparison, other: Comparison, *, seed: int) -> PairedDifference:
    """Return how much more often the candidate of `one` wins than that of `other`.

    The interval is a bootstrap over prompts of the paired difference. The p-value is Wilcoxon's
    signed-rank test of the differences by prompt: exact for few prompts, fast for many, and without
    a seed. The test leaves out prompts without a difference.

    Raises:
        DataError: the prompts, the opponents or the judges differ, or no pair is valid for both.
    """
    for name in ("prompts", "opponents", "judge"):
        if getattr(one, name) != getattr(other, name):
            raise DataError(
                f"The two policies were compared with different {name}, so the difference of "
                f"their win rates would not be theirs alone. Give both the same {name}."
            )
    valid = sorted({*valid_pairs(one)} & {*valid_pairs(other)})
    if not valid:
        raise DataError(
            f"The judge {one.judge} gave no verdict for both policies on any of "
            f"{len(one.prompts)} prompts: they cannot be compared. Check that this judge fits "
            "these prompts."
        )
    differences = np.array([POINTS[one.outcomes[i]] - POINTS[other.outcomes[i]] for i in valid])
    prompts = [one.prompts[number] for number in valid]
    # Mapped to rates between 0 and 1, which `_interval` takes.
    low, high = _interval(prompts, (1 + differences) / 2, seed)
    sums = np.bincount(_number_prompts(prompts), weights=differences)
    sums = sums[sums != 0]
    return PairedDifference(
        difference=float(differences.mean()),
        low=2 * low - 1,
        high=2 * high - 1,
        p_value=float(wilcoxon(sums).pvalue) if len(sums) else 1.0,
        n=len(valid),
        judge=one.judge,
    )


def _doubts(comparison: Comparison, max_invalid: float, max_flip_rate: float) -> list[str]:
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
    if flips / valid > max_flip_rate:
        doubts.append(
            f"the verdict followed the position in {flips} of {valid} valid pairs "
            f"({flips / valid:.1%}), above max_flip_rate={max_flip_rate:g}"
        )
    return doubts


def _interval(prompts: Sequence[str], points: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean of points (N,) in [0, 1], resampled by prompt."""
    numbers = _number_prompts(prompts)
    sums, sizes = np.bincount(numbers, weights=points), np.bincount(numbers)
    if len(np.unique(sums / sizes)) == 1:
        trials = len(sums)
        low, high = proportion_confint(
            trials * sums[0] / sizes[0], trials, alpha=0.05, method="wilson"
        )
        return float(low), float(high)
    interval = bootstrap(
        (sums, sizes),
        lambda sums, sizes, axis: sums.sum(axis) / sizes.sum(axis),
        paired=True,
        n_resamples=RESAMPLES,
        batch=max(1, DRAWN_AT_ONCE // len(sums)),
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _number_prompts(prompts: Sequence[str]) -> list[int]:
    """Return the index of each prompt among the different prompts."""
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    return [numbers[prompt] for prompt in prompts]
