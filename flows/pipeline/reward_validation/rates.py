"""Accuracies on pairs, with their intervals."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from statsmodels.stats.proportion import proportion_confint

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """An accuracy on pairs, with its interval."""

    accuracy: float
    """Share of the pairs that are right; equal scores count half."""

    low: float
    """Lower end of the 95 % interval (Wilson)."""

    high: float
    """Upper end of the 95 % interval (Wilson)."""

    n: int
    """Pairs."""


def hits(margins: ArrayLike) -> Array:
    """Return 1 for each margin above 0, 0.5 for 0, and 0 below 0."""
    return np.heaviside(np.asarray(margins, dtype=float), 0.5)


def measure_rate(right: Array) -> Rate:
    """Return the mean of hits (N,), N at least 1, with its interval."""
    low, high = proportion_confint(right.sum(), right.size, alpha=0.05, method="wilson")
    return Rate(accuracy=float(right.mean()), low=float(low), high=float(high), n=right.size)


def equal_parts(values: Array, count: int) -> list[NDArray[np.intp]]:
    """Return the indices of the values in parts of equal size, by increasing value, none empty.

    Equal values share a part, so the order of the values does not matter.
    """
    part = ((rankdata(values) - 0.5) * count / values.size).astype(int)
    return [np.flatnonzero(part == number) for number in np.unique(part)]
