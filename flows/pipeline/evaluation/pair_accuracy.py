"""Compute accuracies on pairs, with 95 % intervals."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from statsmodels.stats.proportion import proportion_confint

from pipeline.results.reward_report import Rate

Array = NDArray[np.float64]


def hits(margins: ArrayLike) -> Array:
    """Return 1 for each margin above 0, 0.5 for a margin of 0, and 0 for each margin below 0."""
    return np.heaviside(np.asarray(margins, dtype=float), 0.5)


def measure_rate(right: Array) -> Rate:
    """Return the mean of hits (N,), N >= 1, with its 95 % Wilson interval."""
    low, high = proportion_confint(right.sum(), right.size, alpha=0.05, method="wilson")
    return Rate(accuracy=float(right.mean()), low=float(low), high=float(high), n=right.size)


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
