"""Correct a judge's win rate by people's labels of some of the judged pairs.

Prediction-powered inference, PPI++ (arXiv:2311.01453). The labels must be of a random part of the
pairs; then a bias of the judge widens the interval and does not move it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.comparison import POINTS, Comparison, valid_pairs
from pipeline.evaluation.rates import Array
from pipeline.evaluation.sequential.confidence_sequence import Values, mean_interval
from pipeline.inputs.preference_pairs import Vote
from pipeline.judges.verdict import JudgedPrompt
from pipeline.results.evaluation import PeopleAndJudge
from ppo_core.data.rows.dialogues import shown_prompt

Pair = tuple[str, str, str]
"""Prompt, candidate's answer and opponent's answer."""

LEAST_LABELS = 30
"""Smallest number of labeled prompts with which people's labels decide together with the judge."""


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
        """Return the labels of a contest's pairs; None if too few prompts have one to decide.

        Args:
            votes: opinions of people. A vote labels a pair if it has the pair's prompt and both
                answers, in either order.
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
        """Return the win rate of the judged prompts; None if no label is of a valid pair."""
        judged, people = self._by_prompt(comparison)
        if np.isnan(people).all():
            return None
        return people_and_judge(judged, people, corrected_values(judged, people, self.share))

    def _by_prompt(self, comparison: Comparison) -> tuple[Array, Array]:
        """Return the judge's and people's mean points (N,) of each prompt with a valid pair."""
        judged: dict[str, list[float]] = {}
        people: dict[str, list[float]] = {}
        for number in valid_pairs(comparison):
            prompt = comparison.prompts[number]
            pair = prompt, comparison.candidates[number], comparison.opponents[number]
            judged.setdefault(prompt, []).append(POINTS[comparison.outcomes[number]])
            people.setdefault(prompt, []).extend([self.points[pair]] if pair in self.points else [])
        return (
            np.array([np.mean(each) for each in judged.values()]),
            np.array([np.mean(each) if each else np.nan for each in people.values()]),
        )


def corrected_values(judged: Array, people: Array, share: float) -> Values:
    """Return values whose mean is people's win rate.

        g_i = 1/2 + L_i (f_i - 1/2)
        z_i = g_i + (y_i - g_i) / share   with a label, and   z_i = g_i   without

    L_i is the slope of y on f among the labels before i, in [0, 1]. It depends only on earlier
    prompts, so bets on the z_i stay valid at every look. Their mean is E[y] whatever the judge
    does, because a prompt is labeled with probability `share`.

    Args:
        judged: the judge's points f (N,) of the candidate.
        people: people's points y (N,), nan without a label.
        share: fraction of all prompts that have a label.
    """
    labeled = ~np.isnan(people)
    f, y = judged - 0.5, np.where(labeled, people, 0.5) - 0.5
    # A prior of one pair that people call a tie: before the first label, the judge has no weight.
    products = np.cumsum(labeled * f * y) - labeled * f * y
    squares = np.cumsum(labeled * f * f) - labeled * f * f + 0.25
    guess = 0.5 + np.clip(products / squares, 0, 1) * f
    values = guess + labeled * (0.5 + y - guess) / share
    return Values(values, lowest=1 - 1 / share, highest=1 / share)


def people_and_judge(judged: Array, people: Array, values: Values) -> PeopleAndJudge:
    """Return the win rate by people and judge together, with what each of them added.

        rate = mean_n(y) + L (mean_N(f) - mean_n(f)),   L = Cov(y, f) / ((1 + n / N) Var(f))

    with n labeled and N other prompts (PPI++, equations 2 and 6). The interval is the confidence
    sequence of `values`.
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

    `others` is the number of prompts without a label; without any, the weight is 0.
    """
    if others == 0 or f.var() == 0:
        return 0.0
    slope = float(np.cov(f, y, bias=True)[0, 1] / f.var())
    return min(max(slope / (1 + len(f) / others), 0.0), 1.0)


def ppi_variance(f: Array, y: Array, others: Array, weight: float) -> float:
    """Return the variance of the rate: Var(y - L f) / n + L^2 Var(f) / N, with N `others`."""
    variance = (y - weight * f).var() / len(f)
    return float(variance + (weight**2 * others.var() / len(others) if weight else 0.0))
