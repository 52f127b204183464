"""Whether a reward model is as sure of its choices as it is right."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit
from sklearn.metrics import brier_score_loss

from pipeline.reward_validation.rates import Array, Rate, equal_parts, hits, measure_rate


@dataclass(frozen=True, kw_only=True)
class Bin(Rate):
    """Pairs that the model is about equally sure of."""

    confidence: float
    """Mean probability that the model gives to its own choice."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How well sigmoid(margin) is the probability that people prefer the higher score."""

    error: float
    """Expected calibration error, from 0 to 1. Chance alone makes up to 0.4 * sqrt(bins / N) of
    it: 0.04 for 10 bins of 1,000 pairs, 0.4 for 10 pairs."""

    overconfidence: float
    """Mean confidence less accuracy: above 0 the model is too sure of itself, below 0 it is right
    more often than it claims, as one with small scores is."""

    brier: float
    """Mean squared distance of that probability from what people chose; 0.25 for a coin."""

    log_loss: float
    """Mean -log of the probability of what people chose, in nats; 0.693 for a coin."""

    temperature: float | None
    """Divide the scores by it for the least log loss: above 1 the model is too sure of itself.
    None where no temperature is best: the higher score is right on average by nothing at all, or
    in every pair."""

    bins: list[Bin]
    """The reliability plot, from unsure to sure."""


MOST_BINS = 10
PAIRS_A_BIN = 25
"""Fewest pairs of a bin, so that chance alone makes no large error of few pairs."""


def calibrate(margins: ArrayLike) -> Calibration:
    """Compare the confidence of a reward model with its accuracy.

        confidence = sigmoid(|margin|)
        error      = sum over bins of n_b / N * |accuracy_b - confidence_b|

    (arXiv:1706.04599, eq. 3). A pair is listed with its chosen response first, so sigmoid(margin)
    alone would be compared with labels that are all 1; the confidence in the model's own choice,
    0.5 to 1, is compared with whether that choice is right. The bins have equal counts: margins
    of most reward models are small, and bins of equal width would leave some of them empty and
    others with intervals that say nothing. Equal confidences share a bin. There are at most
    `MOST_BINS`, of `PAIRS_A_BIN` pairs or more.

    Args:
        margins: (N,), finite, N at least 1: chosen score less rejected score of pairs that are no
            ties.
    """
    margins = np.asarray(margins, dtype=float)
    confidence = expit(np.abs(margins))
    right = hits(margins)
    bins = min(MOST_BINS, max(1, margins.size // PAIRS_A_BIN))
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
    # scikit-learn's would cut a pair's loss off at 36, and so hide by how much a model is wrong.
    return float(-log_expit(margins).mean())


def _best_temperature(margins: Array) -> float | None:
    """The temperature with the least log loss.

    With 1/temperature the loss is convex, with a slope of -mean(margin)/2 at 0: it falls at first
    only if that mean is above 0, and rises again only if a margin is below 0.
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
