"""Compute win rates and differences between win rates, with 95 % intervals."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import bootstrap, wilcoxon
from statsmodels.stats.proportion import proportion_confint

from pipeline.evaluation.betting import mean_interval
from pipeline.evaluation.comparison import POINTS, Comparison, valid_pairs
from pipeline.evaluation.rates import Array
from pipeline.results.evaluation import PairedDifference, SequentialTest, WinRate
from ppo_core.errors import DataError

RESAMPLES = 4_999
"""Number of bootstrap resamples per interval."""

DRAWN_AT_ONCE = 1_000_000
"""Maximum number of prompts drawn in one batch of resamples, which limits memory to tens of MB."""


def measure_win_rate(
    comparison: Comparison,
    *,
    max_invalid: float,
    max_flip_rate: float,
    test: SequentialTest | None = None,
) -> WinRate:
    """Return the candidate's win rate against the opponent, with a 95 % interval.

    The rate is the mean over prompts of the points of their pairs. The interval is a confidence
    sequence (`mean_interval`): it holds whenever the judge stops.

    Args:
        comparison: pairs judged in both orders.
        max_invalid: maximum fraction of invalid pairs among all pairs for a conclusive rate.
        max_flip_rate: maximum `flip_rate` for a conclusive rate.
        test: how the rate was decided; None for a contest that decides nothing.

    Raises:
        DataError: every pair is invalid.
    """
    valid = valid_pairs(comparison)
    values = values_of_prompts(comparison)
    low, high = mean_interval(values, lowest=0.0, highest=1.0)
    reasons = _doubts(comparison, max_invalid, max_flip_rate)
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
    )


def values_of_prompts(comparison: Comparison) -> Array:
    """Return the mean points (N,) of each prompt with a valid pair, in [0, 1].

    Pairs of one prompt are not independent, so the prompt counts once.
    """
    points: dict[str, list[float]] = {}
    for prompt, outcome in zip(comparison.prompts, comparison.outcomes, strict=True):
        if outcome in POINTS:
            points.setdefault(prompt, []).append(POINTS[outcome])
    return np.array([np.mean(each) for each in points.values()])


def describe(win_rate: WinRate) -> str:
    """Return the win rate as text, such as `64.70% (95% CI 61.7-67.6, n=1000, judge NAME)`."""
    verdict = "" if win_rate.conclusive else ", inconclusive"
    return (
        f"{win_rate.rate:.2%} (95% CI {100 * win_rate.low:.1f}-{100 * win_rate.high:.1f}, "
        f"n={win_rate.n}, judge {win_rate.judge}{verdict})"
    )


def compare_policies(one: Comparison, other: Comparison, *, seed: int) -> PairedDifference:
    """Return the win rate of `one` minus the win rate of `other`, with a 95 % interval.

    The interval is a bootstrap of the paired difference over prompts. The p-value comes from
    Wilcoxon's signed-rank test of each prompt's summed difference, without the prompts whose sum is
    0. This test is exact for few prompts, fast for many prompts, and needs no seed.

    Raises:
        DataError: the comparisons differ in prompts, opponents or judge, or no pair is valid for
            both.
    """
    for name in ("prompts", "opponents", "judge"):
        if getattr(one, name) != getattr(other, name):
            raise DataError(
                f"The two comparisons differ in {name}, so the difference of their win rates "
                f"would not show the policies alone. Use the same {name} in both comparisons."
            )
    valid = sorted({*valid_pairs(one)} & {*valid_pairs(other)})
    if not valid:
        raise DataError(
            f"The judge {one.judge} gave no verdict for both policies on any of "
            f"{len(one.prompts)} prompts, so the policies cannot be compared. Check that this "
            "judge fits these prompts."
        )
    differences = np.array([POINTS[one.outcomes[i]] - POINTS[other.outcomes[i]] for i in valid])
    prompts = [one.prompts[number] for number in valid]
    # `_interval` takes values in [0, 1], so map the differences from [-1, 1].
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
    """Return the 95 % interval of the mean of points (N,) in [0, 1], with prompts resampled."""
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
    """Number the different prompts from 0, and return the number of each prompt."""
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    return [numbers[prompt] for prompt in prompts]
