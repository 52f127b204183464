"""Win rates that are corrected for the judge's preference for a length or for Markdown."""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from pipeline.evaluation.compare_in_both_orders import POINTS, Comparison, valid_pairs
from pipeline.results.evaluation import LengthBin

CONSTANT_DEVIATION = 1.0
"""Standard deviation of the normal prior on the constant a in `length_controlled_rate`, in
logits."""

LENGTH_DEVIATION = 10.0
"""Standard deviation of the normal prior on the coefficients b and c of the length terms, in
logits."""

MIN_PAIRS = 5
"""Minimum number of pairs with d >= 0, and also of pairs with d <= 0, for fitting the step c."""

RATIOS = (0.5, 0.8, 1.25, 2.0)
RATIO_NAMES = ("<0.5", "0.5-0.8", "0.8-1.25", "1.25-2", ">2")
EQUAL = "0.8-1.25"
"""Range of length ratios that counts as equal length."""

MARKDOWN = {
    "headers": re.compile(r"^ {0,3}#{1,6} \S", re.MULTILINE),
    "lists": re.compile(r"^\s*(?:[-*+]|\d+[.)]) \S", re.MULTILINE),
    "bold": re.compile(r"(\*\*|__)(?=\S)[^\n]+?\1"),
}
"""Patterns of the kinds of Markdown that `style_controlled_rate` counts as style."""

_CODE = re.compile(r"^ {0,3}```.*?^ {0,3}```", re.MULTILINE | re.DOTALL)
"""Pattern of a block of code. Blocks are left out, because their lines may look like Markdown."""


@dataclass(frozen=True, kw_only=True)
class ControlledRate:
    """Win rate that a regression predicts for answers of equal length, or also of equal style."""

    rate: float | None
    """The rate; None if it would be an extrapolation."""

    equal: int
    """Number of valid pairs that are about equal."""


def length_controlled_rate(comparison: Comparison) -> ControlledRate:
    """Return the length-controlled win rate, after AlpacaEval 2 (arXiv:2404.04475, section 3).

        d = characters of the candidate - characters of the opponent
        logit P(win) = a + b tanh(d / deviation(d)) + c sign(d)
        rate = (sigmoid(a + c) + sigmoid(a - c)) / 2

    The paper's regression has no term c, and its rate is sigmoid(a). The term c is needed because
    P(win) has a step at d = 0 if a judge prefers the longer answer however small d is. If the
    distribution of d is skewed, the term b cannot fit this step, and a absorbs the error: the rate
    of a judge that decides by length alone then differs from 50 % by up to 25 points. With c, the
    rate is the mean of the predictions just below and just above d = 0. With fewer than `MIN_PAIRS`
    pairs on one side of d = 0, a and c cannot be separated, and c is left out.

    If a judge decides by length alone, length separates wins from losses perfectly. The priors then
    keep all coefficients finite and put the effect into b and c rather than into a. A tie counts as
    half a win and half a loss.

    If all pairs have the same d or the same outcome, length and quality cannot be separated, and
    the raw rate is returned. In any case, the rate is None if no pair has a length ratio in the
    range `EQUAL`. With few such pairs the rate is nearly an extrapolation, so read
    `rate_by_length_ratio` as well.

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
    return ControlledRate(rate=rate if equal else None, equal=equal)


def style_controlled_rate(comparison: Comparison) -> ControlledRate:
    """Return the win rate at equal length and equal Markdown.

    The rate is None if fewer than MIN_PAIRS pairs differ in Markdown, or if no pair has about equal
    lengths and equal numbers of each kind of Markdown.

    The regression of `length_controlled_rate` gets the following two terms for each kind of
    MARKDOWN, and the second of them also for all kinds together:

        f tanh(m / deviation(m)) + g sign(k)
        k = number in the candidate - number in the opponent
        m = number per 1,000 characters in the candidate - the same number in the opponent

    The prediction is for m = k = 0. Unlike the step c, the step g needs no mean over both sides of
    0, because pairs with k = 0 exist.

    Raises:
        DataError: no pair has a verdict.
    """
    valid = valid_pairs(comparison)
    points = np.array([POINTS[comparison.outcomes[number]] for number in valid])
    texts = [(comparison.candidates[number], comparison.opponents[number]) for number in valid]
    length = np.array([len(one) - len(other) for one, other in texts])
    counts = np.array([[count_markdown(text) for text in pair] for pair in texts])
    characters = np.array([[max(len(text), 1) for text in pair] for pair in texts])
    density = 1000 * counts / characters[:, :, None]
    more, slopes = counts[:, 0] - counts[:, 1], density[:, 0] - density[:, 1]
    steps = np.sign(np.concatenate([more, more.sum(axis=1, keepdims=True)], axis=1))
    differs = steps.any(axis=1)
    is_as_long = np.array([_ratio_of(comparison, number) == EQUAL for number in valid])
    equal = int((is_as_long & ~differs).sum())
    if not equal or differs.sum() < MIN_PAIRS:
        return ControlledRate(rate=None, equal=equal)
    if len(np.unique(points)) == 1:
        return ControlledRate(rate=float(points[0]), equal=equal)
    # The deviation is 0 if all slopes of a kind are equal.
    slopes = np.tanh(slopes / np.where(slopes.std(axis=0) > 0, slopes.std(axis=0), 1))
    styles = np.concatenate([steps, slopes], axis=1)
    return ControlledRate(rate=_rate_at_equal_length(points, length, styles), equal=equal)


def count_markdown(text: str) -> list[int]:
    """Return how often each kind of MARKDOWN occurs in a text, outside blocks of code."""
    prose = _CODE.sub("", text)
    return [sum(1 for _ in pattern.finditer(prose)) for pattern in MARKDOWN.values()]


def rate_by_length_ratio(comparison: Comparison) -> list[LengthBin]:
    """Return the win rate by length ratio, from shorter to longer candidates.

    The middle bin includes both of its limits. Every other bin includes the limit further from 1. A
    pair of two empty texts has ratio 1. A pair in which only the opponent's answer is empty is in
    the bin ">2". Bins without a valid pair are left out.

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


def _rate_at_equal_length(
    points: np.ndarray, difference: np.ndarray, styles: np.ndarray | None = None
) -> float:
    """Regress points (N,) on differences of length (N,) and style (N, K); predict at 0."""
    # Imported here because sklearn is slow to import and the reports need only the bins.
    from sklearn.linear_model import LogisticRegression

    columns = [
        CONSTANT_DEVIATION * np.ones(len(points)),
        LENGTH_DEVIATION * np.tanh(difference / (difference.std() or 1)),
    ]
    has_step = min((difference >= 0).sum(), (difference <= 0).sum()) >= MIN_PAIRS
    if has_step:
        columns.append(LENGTH_DEVIATION * np.sign(difference))
    if styles is not None:
        columns += [LENGTH_DEVIATION * column for column in styles.T if column.any()]
    rows = np.stack(columns, axis=1)
    won = np.repeat([1, 0], len(points))
    weights = np.concatenate([points, 1 - points])
    # With C=1, scaling a column by s puts a normal prior of deviation s on its coefficient.
    model = LogisticRegression(C=1.0, fit_intercept=False, solver="newton-cholesky")
    model.fit(np.concatenate([rows, rows]), won, sample_weight=weights)
    constant = CONSTANT_DEVIATION * model.coef_[0, 0]
    step = LENGTH_DEVIATION * model.coef_[0, 2] if has_step else 0.0
    return float(expit(constant + np.array([step, -step])).mean())


def _ratio_of(comparison: Comparison, number: int) -> str:
    """Return the range of the length ratio of the pair at an index."""
    candidate, opponent = len(comparison.candidates[number]), len(comparison.opponents[number])
    if opponent == 0:
        return ">2" if candidate else EQUAL
    ratio = candidate / opponent
    find = bisect_right if ratio < 1 else bisect_left
    return RATIO_NAMES[find(RATIOS, ratio)]
