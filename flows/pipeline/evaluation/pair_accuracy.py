"""Compute accuracies on pairs, with 95 % intervals."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from scipy.stats import t as student_t
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.proportion import proportion_confint

from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.inputs.training_prompts import prompt_groups
from pipeline.results.reward_report import Rate

Array = NDArray[np.float64]


def hits(margins: ArrayLike) -> Array:
    """Return 1 for each margin above 0, 0.5 for a margin of 0, and 0 for each margin below 0."""
    return np.heaviside(np.asarray(margins, dtype=float), 0.5)


def groups_of(pairs: Sequence[LabeledPair]) -> NDArray[np.intp]:
    """Return the number of each pair's prompt, see `prompt_groups`."""
    return np.array(prompt_groups([pair.prompt for pair in pairs]), dtype=np.intp)


def measure_rate(right: Array, groups: NDArray[np.intp]) -> Rate:
    """Return the mean of hits (N,), N >= 1, with its 95 % Wilson interval.

    Args:
        right: the hits.
        groups: number of each pair's prompt (N,). Pairs of one prompt are not independent, so the
            interval is computed for `_effective_number` pairs.
    """
    number = _effective_number(right, groups)
    count = right.sum() * (number / right.size)
    low, high = proportion_confint(count, number, alpha=0.05, method="wilson")
    return Rate(accuracy=float(right.mean()), low=float(low), high=float(high), n=right.size)


def _effective_number(right: Array, groups: NDArray[np.intp]) -> float:
    """Return how many independent pairs would give the mean of hits (N,) the same precision.

        n = min(N, p (1 - p) / V * (t[N - 1] / t[G - 1])^2)

    p is the mean, G the number of prompts, V the cluster-robust variance of p (arXiv:2411.00640,
    section 2.2), and t[k] the 97.5 % quantile of Student's t-distribution with k degrees of freedom
    (Korn and Graubard, Survey Methodology 24, 1998). If p is 0 or 1, then V is 0, and n is G: the
    pairs of a prompt count as one. If all pairs have the same prompt, p is the accuracy on this
    prompt, and n is N.
    """
    total, prompts = right.size, np.unique(groups).size
    mean = right.mean()
    if prompts in (1, total):
        return float(total)
    if mean in (0, 1):
        return float(prompts)
    fitted = OLS(right, np.ones(total)).fit(cov_type="cluster", cov_kwds={"groups": groups})
    more, fewer = student_t.ppf(0.975, [total - 1, prompts - 1])
    wanted, variance = mean * (1 - mean) * (more / fewer) ** 2, fitted.bse[0] ** 2
    return float(wanted / variance) if wanted < total * variance else float(total)


def is_ahead(one: Array, other: Array) -> bool:
    """Return whether the mean of `one` is higher by more than one standard error.

    Both are hits (N,) on the same N pairs. The standard error is that of the difference of two
    equally good models, as in McNemar's test.
    """
    difference = one - other
    return bool(difference.sum() > np.sqrt((difference**2).sum()))


def equal_parts(values: Array, count: int) -> list[NDArray[np.intp]]:
    """Split values into at most `count` groups of about equal size, and return their indices.

    Groups are ordered by increasing value, and no group is empty. Equal values are always in the
    same group, so the result does not depend on the order of `values`.
    """
    part = ((rankdata(values) - 0.5) * count / values.size).astype(int)
    return [np.flatnonzero(part == number) for number in np.unique(part)]
