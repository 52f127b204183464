"""Shares of pairs that were called right, with their intervals."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from statsmodels.stats.proportion import proportion_confint

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A share of pairs that were called right."""

    accuracy: float
    """Share of the pairs, equal scores counted as half."""

    low: float
    """Lower end of the 95 % interval (Wilson)."""

    high: float
    """Upper end of the 95 % interval (Wilson)."""

    n: int
    """Pairs."""


def hits(margins: ArrayLike) -> Array:
    """1 for each margin above 0, half for 0, 0 for one below."""
    return np.heaviside(np.asarray(margins, dtype=float), 0.5)


def measure_rate(right: Array) -> Rate:
    """The share of hits (N,), at least one, with its interval."""
    low, high = proportion_confint(right.sum(), right.size, alpha=0.05, method="wilson")
    return Rate(accuracy=float(right.mean()), low=float(low), high=float(high), n=right.size)


def equal_parts(values: Array, count: int) -> list[NDArray[np.intp]]:
    """Positions of the values, from the least up, in parts of equal size; empty parts left out.

    Equal values share a part, so the order in which they stand changes nothing.
    """
    part = ((rankdata(values) - 0.5) * count / values.size).astype(int)
    return [np.flatnonzero(part == number) for number in np.unique(part)]
