"""Measure whether the confidence of a reward model matches its accuracy."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit
from sklearn.metrics import brier_score_loss

from pipeline.evaluation.pair_accuracy import Array, equal_parts, hits, measure_rate
from pipeline.results.reward_report import Bin, Calibration

MAX_BINS = 10
PAIRS_PER_BIN = 25
"""Minimum number of pairs per bin; fewer would make a bin's accuracy noisy."""


def calibrate(margins: ArrayLike, groups: NDArray[np.intp] | None = None) -> Calibration:
    """Compare the confidence of a reward model with its accuracy.

        confidence = sigmoid(|margin|)
        error      = sum over bins of n_b / N * |accuracy_b - confidence_b|

    The error is the expected calibration error (arXiv:1706.04599, eq. 3). A margin is the chosen
    minus the rejected score. The prediction is not sigmoid(margin), because its label would always
    be 1. It is the confidence in the model's own choice, from 0.5 to 1, and it is compared with the
    accuracy of this choice.

    The bins have about equal counts. Many bins of equal width would be nearly empty, because most
    margins are small. Pairs of equal confidence share a bin. There are at most `MAX_BINS` bins.
    If there are several, each has at least about `PAIRS_PER_BIN` pairs.

    Args:
        margins: finite margins (N,) of pairs without ties, N >= 1.
        groups: number of each pair's prompt (N,), for the intervals of the bins; None if no two
            pairs have the same prompt.
    """
    margins = np.asarray(margins, dtype=float)
    confidence = expit(np.abs(margins))
    right = hits(margins)
    bins = min(MAX_BINS, max(1, margins.size // PAIRS_PER_BIN))
    groups = np.arange(margins.size) if groups is None else groups
    parts = [
        _bin(confidence[part], right[part], groups[part]) for part in equal_parts(confidence, bins)
    ]
    chosen = np.ones(margins.size)
    return Calibration(
        error=sum(part.n * abs(part.accuracy - part.confidence) for part in parts) / margins.size,
        overconfidence=float(confidence.mean() - right.mean()),
        brier=float(brier_score_loss(chosen, expit(margins), labels=[0, 1])),
        log_loss=_log_loss(margins),
        temperature=_best_temperature(margins),
        bins=parts,
    )


def _bin(confidence: Array, right: Array, groups: NDArray[np.intp]) -> Bin:
    return Bin(**vars(measure_rate(right, groups)), confidence=float(confidence.mean()))


def _log_loss(margins: Array) -> float:
    # scikit-learn's log_loss would clip the loss of a pair at 36, and hide larger errors.
    return float(-log_expit(margins).mean())


def _best_temperature(margins: Array) -> float | None:
    """Return the temperature that minimizes the log loss; None if there is no minimum.

    The loss is convex in 1/temperature and has the slope -mean(margin)/2 at 1/temperature = 0.
    Therefore the loss has a minimum only if the mean margin is above 0 and some margin is below 0.
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
