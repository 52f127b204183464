"""Length control: the part of a win rate that the length of answers explains."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from pipeline.evaluation.comparison import POINTS, Comparison, valid_pairs

CONSTANT_DEVIATION = 1.0
"""Standard deviation of the normal prior on the regression's constant, in logits."""

LENGTH_DEVIATION = 10.0
"""Standard deviation of the normal prior on each length term's coefficient, in logits."""

MIN_PAIRS = 5
"""Minimum number of pairs with a shorter and with a longer candidate to fit the step."""

RATIOS = (0.5, 0.8, 1.25, 2.0)
RATIO_NAMES = ("<0.5", "0.5-0.8", "0.8-1.25", "1.25-2", ">2")


@dataclass(frozen=True, kw_only=True)
class LengthControlledRate:
    """Predicted win rate if answers were as long as their opponents."""

    rate: float
    """The regression's prediction with its length terms set to 0."""

    raw_rate: float
    """The measured win rate, ties as halves."""

    n: int
    """Valid pairs."""

    judge: str
    """Name of the judge."""


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Win rate of the pairs in one range of length ratios."""

    ratio: str
    """Characters of the candidate divided by those of the opponent, one of `RATIO_NAMES`."""

    rate: float
    """Win rate of these pairs, ties as halves."""

    n: int
    """Valid pairs."""

    judge: str
    """Name of the judge."""


def length_controlled_rate(comparison: Comparison) -> LengthControlledRate:
    """Return the length-controlled win rate, after AlpacaEval 2 (arXiv:2404.04475, section 3).

        d = characters of the candidate - characters of the opponent
        logit P(win) = a + b tanh(d / deviation(d)) + c sign(d)
        rate = (sigmoid(a + c) + sigmoid(a - c)) / 2

    The paper has only the term b, and its rate is sigmoid(a). If a judge prefers any longer answer,
    P(win) has a step at d = 0. Where d is skewed, b alone cannot fit the step: the constant absorbs
    the rest, and the rate differs from 50 % by up to 25 points. c fits the step, and the rate is
    the mean of its two sides. c is fitted only with at least `MIN_PAIRS` pairs on each side; with
    fewer it cannot be separated from the constant.

    If a judge decides by length alone, length separates the pairs perfectly. The priors then keep
    all coefficients finite and put the effect into b and c rather than a. A tie counts as half a
    win and half a loss.

    If all pairs have the same difference of lengths or the same outcome, length and quality cannot
    be separated, and the rate is the raw rate. If one side is nearly always longer, the rate is an
    extrapolation; see `rate_by_length_ratio`.

    Raises:
        DataError: no pair has a verdict.
    """
    valid = valid_pairs(comparison)
    points = np.array([POINTS[comparison.outcomes[number]] for number in valid])
    difference = np.array(
        [len(comparison.candidates[i]) - len(comparison.opponents[i]) for i in valid]
    )
    raw = float(points.mean())
    told_apart = len(np.unique(points)) > 1 and len(np.unique(difference)) > 1
    return LengthControlledRate(
        rate=_rate_at_equal_length(points, difference) if told_apart else raw,
        raw_rate=raw,
        n=len(valid),
        judge=comparison.judge,
    )


def rate_by_length_ratio(comparison: Comparison) -> list[LengthBin]:
    """Return the win rate by length ratio, from shorter to longer candidates.

    The middle bin includes both its limits, the other bins the limit further from 1. Two empty
    texts are equally long; any other text is more than twice as long as an empty one. A bin without
    a valid pair is left out.

    Raises:
        DataError: no pair has a verdict.
    """
    points = defaultdict(list)
    for number in valid_pairs(comparison):
        name = _ratio_name(len(comparison.candidates[number]), len(comparison.opponents[number]))
        points[name].append(POINTS[comparison.outcomes[number]])
    return [
        LengthBin(
            ratio=name,
            rate=sum(points[name]) / len(points[name]),
            n=len(points[name]),
            judge=comparison.judge,
        )
        for name in RATIO_NAMES
        if name in points
    ]


def _rate_at_equal_length(points: np.ndarray, difference: np.ndarray) -> float:
    """Return the rate from the regression of points (N,) on differences of length (N,)."""
    # Imported here: sklearn is large, and the reports import this module only for the bins.
    from sklearn.linear_model import LogisticRegression

    columns = [
        CONSTANT_DEVIATION * np.ones(len(points)),
        LENGTH_DEVIATION * np.tanh(difference / difference.std()),
    ]
    if min((difference >= 0).sum(), (difference <= 0).sum()) >= MIN_PAIRS:
        columns.append(LENGTH_DEVIATION * np.sign(difference))
    rows = np.stack(columns, axis=1)
    won = np.repeat([1, 0], len(points))
    weights = np.concatenate([points, 1 - points])
    # Scaled columns with the penalty C=1 are normal priors with these standard deviations.
    model = LogisticRegression(C=1.0, fit_intercept=False, solver="newton-cholesky")
    model.fit(np.concatenate([rows, rows]), won, sample_weight=weights)
    constant, step = CONSTANT_DEVIATION * model.coef_[0, 0], LENGTH_DEVIATION * model.coef_[0, 2:]
    return float(expit(constant + np.array([step.sum(), -step.sum()])).mean())


def _ratio_name(candidate: int, opponent: int) -> str:
    if opponent == 0:
        return ">2" if candidate else "0.8-1.25"
    ratio = candidate / opponent
    find = bisect_right if ratio < 1 else bisect_left
    return RATIO_NAMES[find(RATIOS, ratio)]
