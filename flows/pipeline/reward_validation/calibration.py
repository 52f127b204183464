"""Measure whether the confidence of a reward model matches its accuracy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit
from sklearn.metrics import brier_score_loss

from pipeline.reward_validation.rates import Array, Rate, equal_parts, hits, measure_rate


@dataclass(frozen=True, kw_only=True)
class Bin(Rate):
    """Accuracy on pairs of similar confidence."""

    confidence: float
    """Mean probability that the model gives to its own choice."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Quality of sigmoid(margin) as a prediction of people's preference."""

    error: float
    """Expected calibration error, from 0 to 1. Sampling noise contributes up to
    0.4 * sqrt(bins / N), for example 0.04 for 1,000 pairs in 10 bins."""

    overconfidence: float
    """Mean confidence minus accuracy. Above 0, the model is overconfident. Below 0, it is
    underconfident, as models with small scores are."""

    brier: float
    """Mean squared error of sigmoid(margin) against people's choice; 0.25 if all margins are 0."""

    log_loss: float
    """Mean -log probability of people's choice, in nats; 0.693 if all margins are 0."""

    temperature: float | None
    """Divisor of the scores that minimizes the log loss; above 1, the model is overconfident. None
    if there is no minimum: the mean margin is at most 0, or no margin is below 0."""

    bins: list[Bin]
    """Bins of the reliability diagram, by increasing confidence."""


MAX_BINS = 10
PAIRS_PER_BIN = 25
"""Minimum number of pairs per bin, which limits the sampling noise of a bin's accuracy."""


def calibrate(margins: ArrayLike) -> Calibration:
    """Compare the confidence of a reward model with its accuracy.

        confidence = sigmoid(|margin|)
        error      = sum over bins of n_b / N * |accuracy_b - confidence_b|

    The error is the expected calibration error (arXiv:1706.04599, eq. 3). A margin is the chosen
    minus the rejected score, so every label of sigmoid(margin) would be 1. Instead, the confidence
    in the model's own choice, from 0.5 to 1, is compared with the accuracy of this choice.

    The bins have equal counts, because most margins are small and many bins of equal width would
    be nearly empty. Pairs of equal confidence share a bin. There are at most `MAX_BINS` bins, of
    about `PAIRS_PER_BIN` pairs or more.

    Args:
        margins: finite margins (N,) of pairs without ties, N >= 1.
    """
    margins = np.asarray(margins, dtype=float)
    confidence = expit(np.abs(margins))
    right = hits(margins)
    bins = min(MAX_BINS, max(1, margins.size // PAIRS_PER_BIN))
    parts = [_bin(confidence[part], right[part]) for part in equal_parts(confidence, bins)]
    chosen = np.ones(margins.size)
    return Calibration(
        error=sum(part.n * abs(part.accuracy - part.confidence) for part in parts) / margins.size,
        overconfidence=float(confidence.mean() - right.mean()),
        brier=float(brier_score_loss(chosen, expit(margins), labels=[0, 1])),
        log_loss=_log_loss(margins),
        temperature=_best_temperature(margins),
        bins=parts,
    )


def _bin(confidence: Array, right: Array) -> Bin:
    return Bin(**vars(measure_rate(right)), confidence=float(confidence.mean()))


def _log_loss(margins: Array) -> float:
    # scikit-learn's log_loss clips the loss of a pair at 36, which would hide larger errors.
    return float(-log_expit(margins).mean())


def _best_temperature(margins: Array) -> float | None:
    """Return the temperature that minimizes the log loss; None if there is no minimum.

    The loss is convex in 1/temperature and has the slope -mean(margin)/2 at 1/temperature = 0. So
    it has a minimum only if the mean margin is above 0 and some margin is below 0.
    """
    if margins.mean() <= 0 or margins.min() >= 0:
        return None
    scale = np.abs(margins).mean()
    found = minimize_scalar(
        lambda log_temperature: _log_loss(margins / (scale * np.exp(log_temperature))),
        bounds=(-10, 10),
        method="bounded",
    )
    return float(scale * np.exp(found.x))
