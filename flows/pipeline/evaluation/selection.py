"""Choose a policy between the start and the end of PPO, see `SelectionConfig`."""

from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from statistics import fmean

import numpy as np

from pipeline.evaluation.comparison import POINTS, compare
from pipeline.evaluation.evaluate_policies import answer_as_evaluated
from pipeline.inputs.data_sets import RunData
from pipeline.judges.verdict import Judge, JudgedPrompt
from pipeline.results.selection import Selection, TriedPolicy
from pipeline.settings.settings import Settings
from ppo_core.training.evaluation import Answers

AIM = 0.95
"""Divergence that is aimed at, as a fraction of the limit."""

NEAR = 0.85
"""Fraction of the limit from which on a policy is near enough to it."""

MOST = 6
"""Largest number of policies that are tried to get near the limit."""


def choose_policy(
    data: RunData, start: str, end: str, judge: Judge | None, folder: Path
) -> Selection:
    """Choose a policy, and write it to `folder` unless it is the end.

    Args:
        data: data sets and settings of the run.
        start: folder or hub id of the policy from which PPO started.
        end: folder of the policy with which PPO ended.
        judge: judge of the run; None to choose by the divergence alone.
        folder: existing, empty folder.

    Raises:
        ModelError: see `write_interpolated`.
    """
    prompts, limit = data.selection_prompts(), divergence_limit(data.settings)
    between = _Between(data, start, end, prompts, folder)
    if judge is None:
        candidates = nearest_within(between.divergence, limit)
    else:
        candidates = _judged(between, judge, limit, data.settings.selection.weights)
    chosen = _chosen(candidates, limit)
    between.leave_only(chosen)
    return Selection(weight=chosen, limit=limit, prompts=len(prompts), candidates=candidates)


def divergence_limit(settings: Settings) -> float:
    """Return the largest KL divergence of a policy that may be chosen, in nats per answer."""
    return min(settings.ppo.kl_target or np.inf, settings.promotion.max_kl)


def nearest_within(divergence: Callable[[float], float], limit: float) -> list[TriedPolicy]:
    """Measure policies until one is within the limit and near it; return all that were measured.

    The divergence of the policy at w is taken to grow as w^e, from the end down. The exponent e
    begins at 2, as for a small step of the weights, and then follows the last two measurements.

    Args:
        divergence: position w -> KL divergence in nats per answer.
        limit: limit of the divergence, above 0.
    """
    tried = [TriedPolicy(weight=1.0, kl=divergence(1.0))]
    below, above, exponent = 0.0, 1.0, 2.0
    while len(tried) < MOST and not _is_near(tried[-1], limit):
        last = tried[-1]
        guess = last.weight * (AIM * limit / last.kl) ** (1 / exponent) if last.kl > 0 else above
        # A guess outside of what is known halves it.
        weight = guess if below < guess < above else (below + above) / 2
        tried.append(TriedPolicy(weight=weight, kl=divergence(weight)))
        if tried[-1].kl > limit:
            above = weight
        else:
            below = weight
        exponent = _exponent(last, tried[-1]) or exponent
    return tried


def _is_near(candidate: TriedPolicy, limit: float) -> bool:
    is_end = candidate.weight == 1
    return candidate.kl <= limit and (is_end or candidate.kl >= NEAR * limit)


def _exponent(one: TriedPolicy, other: TriedPolicy) -> float | None:
    """Return e of KL ~ w^e through two measurements; None if they do not tell it."""
    if min(one.kl, other.kl) <= 0 or one.weight == other.weight:
        return None
    exponent = log(one.kl / other.kl) / log(one.weight / other.weight)
    return exponent if 0.5 <= exponent <= 8 else None


def _judged(
    between: "_Between", judge: Judge, limit: float, weights: Sequence[float]
) -> list[TriedPolicy]:
    """Measure the policies at `weights`, and let the judge compare those within the limit."""
    start = between.answers(0.0).texts
    candidates = []
    for weight in sorted(weights, reverse=True):
        answers = between.answers(weight)
        assert answers.kl is not None
        points = None
        if answers.kl <= limit:
            outcomes = compare(judge, between.prompts, answers.texts, start).outcomes
            points = fmean(POINTS.get(outcome, POINTS["tie"]) for outcome in outcomes)
        candidates.append(TriedPolicy(weight=weight, kl=answers.kl, points=points))
    return candidates


def _chosen(candidates: Sequence[TriedPolicy], limit: float) -> float:
    """Return the position of the most points within the limit, or without a judge the largest.

    Of equal points, those nearest to the start count. If nothing is within the limit, the policy of
    the least divergence is chosen, which the promotion gate then refuses above its own limit.
    """
    within = [each for each in candidates if each.kl <= limit]
    if not within:
        return min(candidates, key=lambda each: each.kl).weight
    if within[0].points is None:
        return max(each.weight for each in within)
    return max(within, key=lambda each: (each.points, -each.weight)).weight


class _Between:
    """The policies between two policies, written when they are asked for."""

    def __init__(
        self, data: RunData, start: str, end: str, prompts: Sequence[JudgedPrompt], folder: Path
    ) -> None:
        self.prompts = prompts
        self._data = data
        self._start = start
        self._end = end
        self._folder = folder
        self._written: float | None = None

    def answers(self, weight: float) -> Answers:
        """Return the answers of the policy at a position, with their divergence from the start."""
        path = {0.0: self._start, 1.0: self._end}.get(weight) or self._write(weight)
        settings = self._data.settings
        return answer_as_evaluated(settings, path, self.prompts, self._start, self._folder)

    def divergence(self, weight: float) -> float:
        """Return the divergence of the policy at a position from the start."""
        divergence = self.answers(weight).kl
        assert divergence is not None, "The settings allow no decoding without an estimate."
        return divergence

    def leave_only(self, weight: float) -> None:
        """Leave the files of the policy at this position in the folder; none for the end."""
        if weight == 1:
            for file in self._folder.iterdir():
                file.unlink()
        elif self._written != weight:
            self._write(weight)

    def _write(self, weight: float) -> str:
        # Imported here, because it imports torch, and a short step imports this module.
        from ppo_core.training.interpolation import write_interpolated

        write_interpolated(self._start, self._end, weight, self._folder)
        self._written = weight
        return str(self._folder)
