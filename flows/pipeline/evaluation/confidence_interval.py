"""Compute confidence intervals of the mean of bounded values by betting.

The intervals are valid no matter when sampling stops. Source: Waudby-Smith and Ramdas, Estimating
means of bounded random variables by betting (arXiv:2010.09686).
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp

from pipeline.evaluation.pair_accuracy import Array

BETS = np.array((0.05, 0.1, 0.2, 0.4, 0.6, 0.8))
"""Bets, as fractions of the bet that loses all capital at the lowest possible value. Small bets
detect small differences after many values, and large bets detect large differences after few
values."""


@dataclass(frozen=True)
class Values:
    """One value for each of N independent prompts, in an order that no value affects."""

    values: Array
    """Values (N,); their mean is the quantity of interest, such as a win rate."""

    lowest: float = 0.0
    """Lowest possible value."""

    highest: float = 1.0
    """Highest possible value."""


def log_capitals(values: Array, mean: float, lowest: float) -> Array:
    """Return the logs (N + 1,) of the capital before the first bet and after each of N values.

    The capital W results from bets that the mean of the values is above `mean`:

        W = mean over bets b of  prod_i (1 + b (x_i - mean) / (mean - lowest))

    If the true mean is at most `mean`, W is a nonnegative supermartingale that starts at 1, so the
    probability that it ever reaches 1 / alpha is at most alpha (Ville's inequality).

    Args:
        values: values (N,), independent, each at least `lowest`.
        mean: the mean to bet against, above `lowest`.
        lowest: lowest possible value.
    """
    gains = (values - mean) / (mean - lowest)
    logs = np.log1p(BETS[:, None] * gains).cumsum(axis=1)
    return np.append(0.0, logsumexp(logs, axis=0) - np.log(len(BETS)))


def log_capital(values: Array, mean: float, lowest: float) -> float:
    """Return the log of the capital after the last value, see `log_capitals`."""
    return float(log_capitals(values, mean, lowest)[-1])


def mean_interval(
    values: Array, *, lowest: float, highest: float, alpha: float = 0.05
) -> tuple[float, float]:
    """Return an interval of the mean of values (N,), N >= 1: one interval of a confidence sequence.

    With probability 1 - alpha, all intervals of a growing sample contain the mean, so sampling may
    stop after any value.
    """
    values = np.asarray(values, dtype=float)
    low = _lower_end(values, lowest, highest, alpha / 2)
    high = -_lower_end(-values, -highest, -lowest, alpha / 2)
    return low, high


def _lower_end(values: Array, lowest: float, highest: float, alpha: float) -> float:
    """Return the smallest `mean` for which the capital of `log_capital` is below 1 / alpha."""
    wanted = -np.log(alpha)

    def surplus(mean: float) -> float:
        return log_capital(values, mean, lowest) - wanted

    # The surplus falls as the mean grows.
    start = lowest + 1e-9 * (highest - lowest)
    if surplus(start) <= 0:
        return lowest
    if surplus(highest) >= 0:
        return highest
    return float(brentq(surplus, start, highest, xtol=1e-6 * (highest - lowest)))
