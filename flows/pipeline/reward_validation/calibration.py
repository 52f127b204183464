"""Whether the confidence of a reward model matches its accuracy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit
from sklearn.metrics import brier_score_loss

from pipeline.reward_validation.rates import Array, Rate, equal_parts, hits, measure_rate


@dataclass(frozen=True, kw_only=True)
class Bin(Rate):
    """Pairs of similar confidence."""

    confidence: float
    """Mean probability of the model for its own choice."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How well sigmoid(margin) predicts the preference of people."""

    error: float
    """Expected calibration error, from 0 to 1. Sampling noise contributes up to
    0.4 * sqrt(bins / N): 0.04 for 10 bins of 1,000 pairs, 0.4 for 10 pairs."""

    overconfidence: float
    """Mean confidence minus accuracy: overconfident above 0, underconfident below, as a model
    with small scores is."""

    brier: float
    """Mean squared error of sigmoid(margin) against the choice of people; 0.25 for a coin."""

    log_loss: float
    """Mean -log probability of the choice of people, in nats; 0.693 for a coin."""

    temperature: float | None
    """Divisor of the scores with the least log loss; above 1 the model is overconfident.
    None if no temperature is optimal: the mean margin is not above 0, or every margin is."""

    bins: list[Bin]
    """The reliability diagram, by increasing confidence."""


MAX_BINS = 10
PAIRS_PER_BIN = 25
"""Minimum number of pairs in a bin, which bounds the sampling noise of its error."""


def calibrate(margins: ArrayLike) -> Calibration:
    """Compare the confidence of a reward model with its accuracy.

        confidence = sigmoid(|margin|)
        error      = sum over bins of n_b / N * |accuracy_b - confidence_b|

    (arXiv:1706.04599, eq. 3). Every margin is chosen minus rejected, so the labels of
    sigmoid(margin) would all be 1. Instead the confidence in the model's own choice, 0.5 to 1, is
    compared with whether that choice is right. The bins have equal counts: margins of most reward
    models are small, and bins of equal width would be empty or have wide intervals. Equal
    confidences share a bin. There are at most `MAX_BINS` bins of `PAIRS_PER_BIN` pairs or more.

    Args:
        margins: (N,), finite, N at least 1: chosen minus rejected score of pairs without ties.
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
    # scikit-learn clips the loss of a pair at 36, which hides how wrong a model is.
    return float(-log_expit(margins).mean())


def _best_temperature(margins: Array) -> float | None:
    """Return the temperature with the least log loss; None if there is none.

    The loss is convex in 1/temperature, with the slope -mean(margin)/2 at 0: it has a minimum only
    if the mean margin is above 0 and some margin is below 0.
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
