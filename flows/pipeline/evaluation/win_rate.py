"""Outcomes to a win rate: an interval by prompt, and whether the judge can be believed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap, wilcoxon
from statsmodels.stats.proportion import proportion_confint

from pipeline.evaluation.comparison import POINTS, Comparison, valid_pairs
from ppo_core.errors import DataError

RESAMPLES = 4_999
"""Resamples of the prompts that an interval is read from."""

DRAWN_AT_ONCE = 1_000_000
"""Prompts drawn at a time, which bounds the memory: tens of MB."""


@dataclass(frozen=True, kw_only=True)
class WinRate:
    """How often one policy's answers beat the other's."""

    rate: float
    """Share of the valid pairs that it won, a tie counted as half."""

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
    """Valid pairs without a winner, or with another winner in the other order."""

    invalid: int
    """Pairs for which the judge gave no verdict in one order or both; not in `n`."""

    flip_rate: float
    """Share of the valid pairs whose verdict followed the position."""

    conclusive: bool
    """Whether the judge gave verdicts enough, and followed the position rarely enough."""

    reasons: list[str]
    """Why it is not conclusive; empty if it is."""

    judge: str
    """Who judged."""


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """How much more often one policy wins than another, on the same prompts."""

    difference: float
    """The first policy's rate less the second's, over the pairs valid for both."""

    low: float
    """Lower end of the 95 % interval."""

    high: float
    """Upper end of the 95 % interval."""

    p_value: float
    """Probability of ranks this far from even, or further, between equal policies."""

    n: int
    """Pairs valid for both policies."""

    judge: str
    """Who judged."""


def measure_win_rate(
    comparison: Comparison, *, max_invalid: float, max_flip_rate: float, seed: int
) -> WinRate:
    """How often the candidates beat their opponents, with a 95 % interval.

    The interval is the bootstrap's by prompt (percentile): all answers to one prompt are resampled
    together. Where every prompt has the same rate (all wins, all ties, a single prompt) no
    resample differs from another; the interval is then Wilson's, a prompt counted as one trial.

    Args:
        comparison: the pairs, judged in both orders.
        max_invalid: share of all pairs without a verdict above which it is inconclusive.
        max_flip_rate: share of the valid pairs above which flips make it inconclusive.
        seed: decides the resamples.

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
    """The rate as a person reads it: `64.70% (95% CI 61.7-67.6, n=1000, judge NAME)`."""
    verdict = "" if win_rate.conclusive else ", inconclusive"
    return (
        f"{win_rate.rate:.2%} (95% CI {100 * win_rate.low:.1f}-{100 * win_rate.high:.1f}, "
        f"n={win_rate.n}, judge {win_rate.judge}{verdict})"
    )


def compare_policies(one: Comparison, other: Comparison, *, seed: int) -> PairedDifference:
    """How much more often the candidates of `one` win than those of `other`.

    The interval is the bootstrap's by prompt of the paired difference. The p-value is Wilcoxon's
    signed-rank test of each prompt's difference: it is exact for few prompts, takes no time for
    many and no seed, where a permutation test takes seconds for a p-value of at least 2e-4.
    Prompts without a difference say nothing about its sign and are left out of the test.

    Raises:
        DataError: the prompts, the opponents or the judges are not the same, or no pair is valid
            for both.
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
    # As a rate between 0 and 1, so that one interval serves both figures.
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
    """Why the judge's verdicts decide nothing; empty if they do."""
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
    """95 % interval of the mean of points (N,) between 0 and 1, resampled by prompt."""
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
    """The same number for the same prompt, counted from 0."""
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    return [numbers[prompt] for prompt in prompts]
