"""How much of a win rate is length."""

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
"""Fewest pairs with the shorter candidate, and with the longer one, for the step to be fitted."""

RATIOS = (0.5, 0.8, 1.25, 2.0)
RATIO_NAMES = ("<0.5", "0.5-0.8", "0.8-1.25", "1.25-2", ">2")


@dataclass(frozen=True, kw_only=True)
class LengthControlledRate:
    """The win rate to expect if answers were as long as their opponents."""

    rate: float
    """The regression's prediction with its length terms set to 0."""

    raw_rate: float
    """The win rate as it was, ties as halves."""

    n: int
    """Valid pairs."""

    judge: str
    """Who judged."""


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """The win rate where the candidate is so many times as long as the opponent."""

    ratio: str
    """Characters of the candidate by those of the opponent, one of `RATIO_NAMES`."""

    rate: float
    """Win rate of these pairs, ties as halves."""

    n: int
    """Valid pairs."""

    judge: str
    """Who judged."""


def length_controlled_rate(comparison: Comparison) -> LengthControlledRate:
    """The length-controlled win rate, after AlpacaEval 2 (arXiv:2404.04475, section 3).

        d = characters of the candidate - characters of the opponent
        logit P(win) = a + b tanh(d / deviation(d)) + c sign(d)
        rate = (sigmoid(a + c) + sigmoid(a - c)) / 2

    The paper's length term is the one with b, and its rate sigmoid(a). A judge that wants any
    longer answer steps at d = 0, which b alone cannot follow where d is skewed: the constant takes
    up the rest, and the rate misses 50 % by up to 25 points. c is that step, and the rate is the
    mean of both its sides. It is fitted if there are `MIN_PAIRS` pairs on either side; with fewer
    it could not be told from the constant.

    The priors make a judge that decides by length alone, which separates the pairs perfectly,
    explain itself by b and c rather than by the constant, and keep all of them finite. A tie is
    half a win and half a loss.

    If the difference of lengths is the same in all pairs, or all pairs have the same outcome,
    nothing tells length from quality and the rate is the raw one. Where one side is nearly always
    the longer one, the rate is extrapolated: look at `rate_by_length_ratio`.

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
    """The win rate by how much longer the candidate is, from shorter to longer.

    The middle bin includes both its limits, the others the limit further from 1. Two empty texts
    are equally long, and any other is more than twice as long as an empty one. A bin without a
    valid pair is left out.

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
    """The rate by the regression of points (N,) on differences of length (N,)."""
    # Most of a second, for which reports that name the bins do not have to wait.
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
    # Scaled columns under a penalty of C=1 are coefficients with normal priors of these scales.
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
