"""Choose which policy of PPO is evaluated and registered, see `SelectionConfig`.

The candidates are policies on the line through the start and the end of PPO, and earlier policies
of PPO. The policy at position w has the weights start + w (end - start), see `write_interpolated`.
The KL divergence of each candidate is measured from the start.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from pipeline.evaluation.compare_in_both_orders import (
    POINTS,
    Comparison,
    compare,
    first_reason,
    valid_pairs,
)
from pipeline.evaluation.evaluate_policies import answer_as_evaluated
from pipeline.inputs.run_data import RunData
from pipeline.judges.verdict import Judge, JudgedPrompt
from pipeline.results.selection import Selection, TriedPolicy
from pipeline.settings.evaluation_config import MOST_TRIES
from pipeline.settings.settings import Settings
from ppo_core.checkpointing.folders import saved_policies
from ppo_core.errors import JudgeError
from ppo_core.models.files.interpolation import write_interpolated
from ppo_core.training.answer_prompts import Answers

NO_ESTIMATE = "The settings guarantee that the divergence can be estimated."

ABOVE_TARGET = 1.1
"""Largest divergence of the chosen policy, as a fraction of `ppo.kl_target`. The fraction is above
1 because runs can end above their target; most end within 15 % of it."""

BELOW_LIMIT = 0.9
"""Largest divergence of the chosen policy, as a fraction of `promotion.max_kl`. The fraction is
below 1 because the promotion gate measures the divergence on other prompts, where it differs by
about 5 %."""

AIM = 0.95
"""Target divergence of the search, as a fraction of the limit."""

NEAR = 0.9
"""Smallest divergence that ends the search early, as a fraction of the limit. With ABOVE_TARGET, a
policy at 0.99 to 1.1 times its target stays. On the stories, the divergence on prompts that PPO did
not train on was 6 % lower, as a mean over 28 runs."""

FURTHEST = 1.2
"""Largest position of a policy with `ppo.kl_target`; such a policy has about 1.2^2 times the
divergence of the end."""


def choose_policy(
    data: RunData,
    start: str,
    end: str,
    judge: Judge | None,
    folder: Path,
    *,
    earlier: Path | None = None,
) -> Selection:
    """Choose a policy, and write it to `folder` unless it is the policy `end`.

    Args:
        data: data sets and settings of the run.
        start: folder or hub id of the policy from which PPO started.
        end: folder of the policy with which PPO ended.
        judge: judge of the run; None to choose by the divergence alone.
        folder: existing, empty folder.
        earlier: folder of earlier policies of PPO, see `EarlierPolicies`.

    Raises:
        JudgeError: too many verdicts of the judge are invalid.
        ModelError: see `write_interpolated`.
    """
    prompts, limit = data.selection_prompts(), divergence_limit(data.settings)
    policies = _Candidates(data, start, end, earlier, prompts, folder)
    if judge is None:
        furthest = FURTHEST if data.settings.ppo.kl_target else 1.0
        candidates = nearest_within(policies.divergence, limit, furthest)
    else:
        candidates = _judged(policies, judge, limit)
    chosen = _best(candidates, limit)
    policies.leave_only(chosen)
    return Selection(
        weight=chosen.weight,
        update=chosen.update,
        limit=limit,
        prompts=len(prompts),
        candidates=candidates,
    )


def divergence_limit(settings: Settings) -> float:
    """Return the largest KL divergence that the chosen policy may have, in nats per answer."""
    target, most = settings.ppo.kl_target or np.inf, settings.promotion.max_kl
    return min(ABOVE_TARGET * target, BELOW_LIMIT * most)


def nearest_within(
    divergence: Callable[[float], float], limit: float, furthest: float
) -> list[TriedPolicy]:
    """Measure policies until one diverges by NEAR to 1 times the limit; return all measurements.

    The search starts at the end of PPO, w = 1. It ends early at w = `furthest` if this policy is
    within the limit. It measures at most MOST_TRIES policies. It assumes that the KL divergence is
    proportional to w^e. At first, e is 2, which holds for small changes of the weights. Later
    values of e fit the last two measurements.

    Args:
        divergence: function that returns the KL divergence at a position w, in nats per answer.
        limit: limit of the divergence, above 0.
        furthest: largest position w, at least 1.
    """

    def is_near(tried: TriedPolicy) -> bool:
        return tried.kl <= limit and (tried.kl >= NEAR * limit or tried.weight == furthest)

    tried = [TriedPolicy(weight=1.0, kl=divergence(1.0))]
    below, above, exponent = 0.0, math.inf, 2.0
    while len(tried) < MOST_TRIES and not is_near(last := tried[-1]):
        if last.kl > limit:
            above = last.weight
        else:
            below = last.weight
        ratio = AIM * limit / last.kl if last.kl > 0 else math.inf
        weight = min(last.weight * ratio ** (1 / exponent), furthest)
        if not below < weight < above:
            weight = (below + above) / 2
        tried.append(TriedPolicy(weight=weight, kl=divergence(weight)))
        exponent = _exponent(last, tried[-1]) or exponent
    return tried


def _exponent(one: TriedPolicy, other: TriedPolicy) -> float | None:
    """Return the exponent e of KL ~ w^e that fits two measurements; None if it is not plausible."""
    if min(one.kl, other.kl) <= 0 or one.weight == other.weight:
        return None
    exponent = math.log(one.kl / other.kl) / math.log(one.weight / other.weight)
    return exponent if 0.5 <= exponent <= 8 else None


def _judged(policies: "_Candidates", judge: Judge, limit: float) -> list[TriedPolicy]:
    """Measure each candidate; if it is within the limit, the judge compares it with the start."""
    start, tried = policies.answers(0.0).texts, []
    for weight, update in policies.places():
        answers = policies.answers(weight, update)
        assert answers.kl is not None, NO_ESTIMATE
        points = None
        if answers.kl <= limit:
            judged = compare(judge, policies.prompts, answers.texts, start)
            points = _points(judged, policies.settings.evaluation.max_invalid)
        tried.append(TriedPolicy(weight=weight, update=update, kl=answers.kl, points=points))
    return tried


def _points(judged: Comparison, max_invalid: float) -> float:
    """Return the mean points of the pairs with a valid outcome.

    Raises:
        JudgeError: the share of invalid pairs is above `max_invalid`.
    """
    total, invalid = len(judged.outcomes), judged.outcomes.count("invalid")
    if invalid > max_invalid * total:
        raise JudgeError(
            f"The judge {judged.judge} gave no valid verdict on {invalid} of {total} "
            f"pairs, above evaluation.max_invalid={max_invalid:g}, so it cannot choose the policy. "
            f"{first_reason(judged)} Correct the judge's server or function, and resume the "
            "run; another judge, or selection.method='kl', needs a new run."
        )
    return fmean(POINTS[judged.outcomes[number]] for number in valid_pairs(judged))


def _best(tried: Sequence[TriedPolicy], limit: float) -> TriedPolicy:
    """Return the best policy within the limit.

    With a judge, the best policy has the most points. If several policies have the most points, the
    best has the smallest divergence from the start. Without a judge, the best policy has the
    largest position. If no policy is within the limit, return the policy with the smallest
    divergence; the promotion gate refuses this policy if its divergence is above `max_kl`.
    """
    within = [each for each in tried if each.kl <= limit]
    if not within:
        return min(tried, key=lambda each: each.kl)
    if within[0].points is None:
        return max(within, key=lambda each: each.weight)
    return max(within, key=lambda each: (each.points, -each.kl))


class _Candidates:
    """The candidates. An interpolated policy is written to disk only when it is needed."""

    def __init__(
        self,
        data: RunData,
        start: str,
        end: str,
        earlier: Path | None,
        prompts: Sequence[JudgedPrompt],
        folder: Path,
    ) -> None:
        self.prompts = prompts
        # The later evaluation of the chosen policy uses `seed`, so use another seed here.
        self.settings = replace(data.settings, seed=(data.settings.seed + 1) % 2**32)
        self._start = start
        self._end = end
        self._earlier = {} if earlier is None else saved_policies(earlier)
        self._folder = folder
        self._written: float | None = None

    def places(self) -> list[tuple[float, int | None]]:
        """Return (position, update) of each candidate for the judge.

        Interpolated policies come first, from the largest position to the smallest. Earlier
        policies follow, from the last update to the first.
        """
        weights = sorted({*self.settings.selection.weights}, reverse=True)
        return [
            *((weight, None) for weight in weights),
            *((1.0, update) for update in reversed(self._earlier)),
        ]

    def answers(self, weight: float, update: int | None = None) -> Answers:
        """Return the answers of a policy, with their divergence from the start."""
        if update is None:
            path = {0.0: self._start, 1.0: self._end}.get(weight) or self._write(weight)
        else:
            path = str(self._earlier[update])
        return answer_as_evaluated(self.settings, path, self.prompts, self._start, self._folder)

    def divergence(self, weight: float) -> float:
        """Return the divergence from the start, in nats per answer, of the policy at a position."""
        divergence = self.answers(weight).kl
        assert divergence is not None, NO_ESTIMATE
        return divergence

    def leave_only(self, chosen: TriedPolicy) -> None:
        """Leave only the chosen policy in the folder, or nothing if PPO ended with this policy."""
        if chosen.weight == 1:
            shutil.rmtree(self._folder)
            self._folder.mkdir()
            if chosen.update is not None:
                shutil.copytree(self._earlier[chosen.update], self._folder, dirs_exist_ok=True)
        elif self._written != chosen.weight:
            self._write(chosen.weight)

    def _write(self, weight: float) -> str:
        write_interpolated(self._start, self._end, weight, self._folder)
        self._written = weight
        return str(self._folder)
