"""Compute accuracies on pairs, with 95 % intervals, and compare two models on the same pairs."""

from collections.abc import Sequence
from typing import Any

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
    groups = _independent_groups(groups)
    total, prompts = right.size, np.unique(groups).size
    mean = right.mean()
    if prompts == total:
        return float(total)
    if mean in (0, 1):
        return float(prompts)
    more, fewer = student_t.ppf(0.975, [total - 1, prompts - 1])
    wanted = mean * (1 - mean) * (more / fewer) ** 2
    variance = _fit_mean(right, groups).bse[0] ** 2
    return float(wanted / variance) if wanted < total * variance else float(total)


def difference_interval(differences: Array, groups: NDArray[np.intp]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of differences (N,), N >= 2, by a t-distribution.

    Args:
        differences: hits of one model minus hits of another on the same N pairs.
        groups: number of each pair's prompt (N,). The variance is cluster-robust, and G prompts
            give G - 1 degrees of freedom. With one pair for each prompt, the interval is that of
            the paired t-test.
    """
    low, high = _fit_mean(differences, _independent_groups(groups)).conf_int()[0]
    return float(low), float(high)


def is_ahead(one: Array, other: Array, groups: NDArray[np.intp]) -> bool:
    """Return whether the mean of `one` is higher by more than one standard error.

    The standard error is that of the difference of two equally good models, as in McNemar's test,
    with the differences of one prompt added up.

    Args:
        one: hits (N,) of one model.
        other: hits (N,) of another model on the same N pairs.
        groups: number of each pair's prompt (N,).
    """
    by_prompt = np.bincount(_independent_groups(groups), weights=one - other)
    return bool(by_prompt.sum() > np.sqrt((by_prompt**2).sum()))


def _independent_groups(groups: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return `groups`; if all pairs have the same prompt, return one group for each pair."""
    return groups if np.unique(groups).size > 1 else np.arange(groups.size)


def _fit_mean(values: Array, groups: NDArray[np.intp]) -> Any:
    """Fit the mean of values (N,), which are independent only if their groups differ."""
    fit = OLS(values, np.ones(values.size)).fit
    return fit(cov_type="cluster", cov_kwds={"groups": groups}, use_t=True)


def equal_parts(values: Array, count: int) -> list[NDArray[np.intp]]:
    """Split values into at most `count` groups of about equal size, and return their indices.

    Groups are ordered by increasing value, and no group is empty. Equal values are always in the
    same group, so the result does not depend on the order of `values`.
    """
    part = ((rankdata(values) - 0.5) * count / values.size).astype(int)
    return [np.flatnonzero(part == number) for number in np.unique(part)]
