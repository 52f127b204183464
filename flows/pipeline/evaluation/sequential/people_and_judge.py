"""Correct a judge's win rate by people's labels of some of the judged pairs.

The method is prediction-powered inference, PPI++ (arXiv:2311.01453). The labeled pairs must be a
random part of all pairs. Then a bias of the judge makes the interval wider, but does not shift it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.compare_in_both_orders import POINTS, Comparison
from pipeline.evaluation.confidence_interval import Values, mean_interval
from pipeline.evaluation.pair_accuracy import Array
from pipeline.inputs.human_labels_to_pairs import Vote
from pipeline.judges.verdict import JudgedPrompt
from pipeline.results.evaluation import PeopleAndJudge
from ppo_core.data.rows.dialogues import shown_prompt

Pair = tuple[str, str, str]
"""Prompt, candidate's answer and opponent's answer."""

LEAST_LABELS = 30
"""Minimum number of labeled prompts for people's labels to decide together with the judge."""


@dataclass(frozen=True)
class Labels:
    """People's labels of some of the pairs that a judge compares."""

    points: Mapping[Pair, float]
    """Mean points of the candidate by pair."""

    share: float
    """Fraction of all prompts of the contest that have a label."""

    @classmethod
    def of(
        cls,
        votes: Sequence[Vote],
        prompts: Sequence[JudgedPrompt],
        candidates: Sequence[str],
        opponents: Sequence[str],
    ) -> "Labels | None":
        """Return the labels of the pairs; None if fewer than LEAST_LABELS prompts are labeled.

        Args:
            votes: labels of people. A vote is a label of a pair if it has the same prompt and the
                same two answers, in either order.
            prompts: prompts of the pairs.
            candidates: answers of the candidate.
            opponents: answers of the opponent.
        """
        given: dict[Pair, list[float]] = {}
        for vote in votes:
            first, prompt = POINTS[vote.label], shown_prompt(vote.prompt)
            given.setdefault((prompt, vote.first, vote.second), []).append(first)
            given.setdefault((prompt, vote.second, vote.first), []).append(1 - first)
        pairs = list(zip(map(shown_prompt, prompts), candidates, opponents, strict=True))
        points = {pair: float(np.mean(given[pair])) for pair in pairs if pair in given}
        labeled = {prompt for prompt, _, _ in points}
        if len(labeled) < LEAST_LABELS:
            return None
        return cls(points, len(labeled) / len({prompt for prompt, _, _ in pairs}))

    def values(self, comparison: Comparison) -> Values:
        """Return the corrected values of the judged prompts, in the order of the comparison."""
        return corrected_values(*self._by_prompt(comparison), self.share)

    def rate(self, comparison: Comparison) -> PeopleAndJudge | None:
        """Return the win rate over the judged prompts; None if no valid pair has a label."""
        judged, people = self._by_prompt(comparison)
        if np.isnan(people).all():
            return None
        return people_and_judge(judged, people, corrected_values(judged, people, self.share))

    def _by_prompt(self, comparison: Comparison) -> tuple[Array, Array]:
        """Return the mean points (N,) by the judge and by people, for N prompts with a valid pair.

        People's points are NaN for a prompt without a label.
        """
        judged: dict[str, list[float]] = {}
        people: dict[str, list[float]] = {}
        for number, outcome in enumerate(comparison.outcomes):
            if outcome == "invalid":
                continue
            prompt = comparison.prompts[number]
            pair = prompt, comparison.candidates[number], comparison.opponents[number]
            judged.setdefault(prompt, []).append(POINTS[outcome])
            people.setdefault(prompt, []).extend([self.points[pair]] if pair in self.points else [])
        return (
            np.array([np.mean(each) for each in judged.values()]),
            np.array([np.mean(each) if each else np.nan for each in people.values()]),
        )


def corrected_values(judged: Array, people: Array, share: float) -> Values:
    """Return values whose mean is people's win rate.

        g_i = 1/2 + L_i (f_i - 1/2)
        z_i = g_i + (y_i - g_i) / share   with a label, and   z_i = g_i   without

    L_i is the slope of a regression of y on f over the labels before i, limited to [0, 1]. L_i
    depends only on earlier prompts, so bets on z_i stay valid no matter when sampling stops. A
    prompt is labeled with probability `share`, so the mean of z_i is E[y] for any judge.

    Args:
        judged: points f (N,) of the candidate by the judge.
        people: points y (N,) of the candidate by people; NaN without a label.
        share: fraction of all prompts that have a label.
    """
    labeled = ~np.isnan(people)
    f, y = judged - 0.5, np.where(labeled, people, 0.5) - 0.5
    # One pair that people call a tie is added as a prior, so L is 0 before the first label.
    products = np.cumsum(labeled * f * y) - labeled * f * y
    squares = np.cumsum(labeled * f * f) - labeled * f * f + 0.25
    guess = 0.5 + np.clip(products / squares, 0, 1) * f
    values = guess + labeled * (0.5 + y - guess) / share
    return Values(values, lowest=1 - 1 / share, highest=1 / share)


def people_and_judge(judged: Array, people: Array, values: Values) -> PeopleAndJudge:
    """Return the win rate from the labels of people and the verdicts of the judge together.

        rate = mean_n(y) + L (mean_N(f) - mean_n(f)),   L = Cov(y, f) / ((1 + n / N) Var(f))

    n is the number of labeled prompts, and N the number of other prompts (PPI++, equations 2 and
    6). The interval is the confidence sequence of `values`.
    """
    labeled = ~np.isnan(people)
    n, f, y, others = int(labeled.sum()), judged[labeled], people[labeled], judged[~labeled]
    weight = ppi_weight(f, y, len(others))
    rate = float(y.mean() + (weight * (others.mean() - f.mean()) if len(others) else 0.0))
    variance = ppi_variance(f, y, others, weight)
    low, high = mean_interval(values.values, lowest=values.lowest, highest=values.highest)
    return PeopleAndJudge(
        rate=min(max(rate, 0.0), 1.0),
        low=max(low, 0.0),
        high=min(high, 1.0),
        labels=n,
        weight=weight,
        worth=y.var() / variance if variance > 0 else float(n),
    )


def ppi_weight(f: Array, y: Array, others: int) -> float:
    """Return the weight L of the judge in [0, 1], from its points f (n,) and people's y (n,).

    `others` is the number of prompts without a label; if it is 0, the weight is 0.
    """
    if others == 0 or f.var() == 0:
        return 0.0
    slope = float(np.cov(f, y, bias=True)[0, 1] / f.var())
    return min(max(slope / (1 + len(f) / others), 0.0), 1.0)


def ppi_variance(f: Array, y: Array, others: Array, weight: float) -> float:
    """Return the variance of the rate: Var(y - L f) / n + L^2 Var(f) / N, for N = len(others)."""
    variance = (y - weight * f).var() / len(f)
    return float(variance + (weight**2 * others.var() / len(others) if weight else 0.0))
