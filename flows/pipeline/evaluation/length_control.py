"""Win rates that are corrected for the judge's preference for longer or shorter answers."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from pipeline.evaluation.comparison import POINTS, Comparison, valid_pairs
from pipeline.results.evaluation import LengthBin

CONSTANT_DEVIATION = 1.0
"""Standard deviation of the normal prior on the constant a in `length_controlled_rate`, in
logits."""

LENGTH_DEVIATION = 10.0
"""Standard deviation of the normal prior on the coefficients b and c of the length terms, in
logits."""

MIN_PAIRS = 5
"""Minimum number of pairs with d >= 0, and also with d <= 0, for which the step c is fitted."""

RATIOS = (0.5, 0.8, 1.25, 2.0)
RATIO_NAMES = ("<0.5", "0.5-0.8", "0.8-1.25", "1.25-2", ">2")
EQUAL = "0.8-1.25"
"""Range of length ratios that counts as equal length."""


@dataclass(frozen=True, kw_only=True)
class LengthControlledRate:
    """Win rate that the regression predicts for answers of equal length."""

    rate: float | None
    """Mean of the predictions with the tanh term at 0 and the sign term at +1 and at -1; None if no
    pair has about equal lengths, because the mean would be an extrapolation."""

    raw_rate: float
    """Measured win rate; a tie counts as half a win."""

    equal: int
    """Number of valid pairs whose length ratio is in the range `EQUAL`."""

    n: int
    """Number of valid pairs."""

    judge: str
    """Name of the judge."""


def length_controlled_rate(comparison: Comparison) -> LengthControlledRate:
    """Return the length-controlled win rate, after AlpacaEval 2 (arXiv:2404.04475, section 3).

        d = characters of the candidate - characters of the opponent
        logit P(win) = a + b tanh(d / deviation(d)) + c sign(d)
        rate = (sigmoid(a + c) + sigmoid(a - c)) / 2

    The paper's regression has no term c, and its rate is sigmoid(a). The term c is needed because
    P(win) has a step at d = 0 if a judge prefers the longer answer by any margin. Where the
    distribution of d is skewed, the term b cannot fit this step, and a absorbs the error: the rate
    of a judge that decides by length alone then differs from 50 % by up to 25 points. With c, the
    rate is the mean of the predictions just below and just above d = 0. With fewer than `MIN_PAIRS`
    pairs on one side of d = 0, a and c cannot be separated, and c is left out.

    If a judge decides by length alone, length separates wins from losses perfectly. The priors then
    keep all coefficients finite and put the effect into b and c rather than into a. A tie counts as
    half a win and half a loss.

    If all pairs have the same d or the same outcome, length and quality cannot be separated, and
    the raw rate is returned. If no pair has about equal lengths, the rate is None. With few such
    pairs the rate is nearly an extrapolation, so read `rate_by_length_ratio` as well.

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
    rate = _rate_at_equal_length(points, difference) if told_apart else raw
    equal = sum(_ratio_of(comparison, number) == EQUAL for number in valid)
    return LengthControlledRate(
        rate=rate if equal else None,
        raw_rate=raw,
        equal=equal,
        n=len(valid),
        judge=comparison.judge,
    )


def rate_by_length_ratio(comparison: Comparison) -> list[LengthBin]:
    """Return the win rate by length ratio, from shorter to longer candidates.

    The middle bin includes both of its limits. Every other bin includes the limit further from 1.
    A pair of two empty texts has ratio 1. A pair with only an empty opponent is in the bin ">2".
    Bins without a valid pair are left out.

    Raises:
        DataError: no pair has a verdict.
    """
    points = defaultdict(list)
    for number in valid_pairs(comparison):
        points[_ratio_of(comparison, number)].append(POINTS[comparison.outcomes[number]])
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
    """Fit points (N,) to differences of length (N,), and return the rate at equal length."""
    # Imported here because sklearn is slow to import and the reports need only the bins.
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
    # With C=1, scaling a column by s puts a normal prior of deviation s on its coefficient.
    model = LogisticRegression(C=1.0, fit_intercept=False, solver="newton-cholesky")
    model.fit(np.concatenate([rows, rows]), won, sample_weight=weights)
    constant, step = CONSTANT_DEVIATION * model.coef_[0, 0], LENGTH_DEVIATION * model.coef_[0, 2:]
    return float(expit(constant + np.array([step.sum(), -step.sum()])).mean())


def _ratio_of(comparison: Comparison, number: int) -> str:
    """Return the range of the length ratio of the pair at an index."""
    candidate, opponent = len(comparison.candidates[number]), len(comparison.opponents[number])
    if opponent == 0:
        return ">2" if candidate else EQUAL
    ratio = candidate / opponent
    find = bisect_right if ratio < 1 else bisect_left
    return RATIO_NAMES[find(RATIOS, ratio)]
