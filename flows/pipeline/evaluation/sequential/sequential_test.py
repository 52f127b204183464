"""Ask a judge about pairs in batches, until the win rate is decided or all pairs are judged."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from pipeline.evaluation.compare_in_both_orders import POINTS, Comparison, compare, joined
from pipeline.evaluation.confidence_interval import BETS, Values, log_capitals
from pipeline.evaluation.pair_accuracy import Array
from pipeline.evaluation.sequential.people_and_judge import Labels
from pipeline.evaluation.win_rate import values_of_prompts
from pipeline.judges.verdict import Judge, JudgedPrompt
from pipeline.results.evaluation import Decided, PeopleAndJudge, SequentialTest
from ppo_core.data.rows.dialogues import shown_prompt

PAIRS_AT_ONCE = 32
"""Number of pairs that the judge compares between two looks at the result."""

FUTILE_ALPHA = 0.05
"""Largest probability that a candidate with a win rate of `gain` or more is found "not better".
This error refuses a good candidate, but never promotes a bad candidate."""

SMALLEST_RATE = 1e-9
"""Smallest win rate to bet against, because a bet against 0 would need infinite stakes."""

WEEKS = 10_000
"""Default number of simulated weeks of `promoted_share`."""

LARGEST_LOG = 700.0
"""Largest log of the evidence that is reported: JSON has no infinity."""


@dataclass(frozen=True, kw_only=True)
class StoppingRule:
    """Rule that decides when enough pairs are judged, and whether the candidate is better."""

    least: float
    """Win rate that the candidate must exceed."""

    gain: float | None
    """Win rate above `least` that is worth finding. If None, a candidate is never found "not
    better", so that all pairs are judged unless the candidate is found better."""

    alpha: float
    """Largest probability that a candidate with a win rate of at most `least` is found better."""

    def decide(self, values: Values, worst: Values | None = None) -> Decided:
        """Return the decision from the values of N independent prompts, for any N.

        The decision is "better" if the capital of bets that the mean is above `least` is at least
        1 / alpha, see `log_capitals`. It is "not better" if the capital of bets that the mean is
        below `gain` is at least 1 / FUTILE_ALPHA.

        `worst` has the values in which each missing verdict is a loss. The decision "better" uses
        `worst`, because a server may give no verdict on bad answers. If None, none is missing.
        """
        if self._is_better(worst or values)[-1]:
            return "better"
        return "not better" if self._is_worse(values)[-1] else "undecided"

    def first_decision(self, points: Array) -> tuple[Decided, int]:
        """Decide after every PAIRS_AT_ONCE of N >= 1 points in [0, 1], and after the last point.

        Returns:
            The first decision that is not "undecided", and the number of points that it needed. If
            there is no such decision: "undecided" and N.
        """
        decisions = self._decisions(Values(points))
        looks = [*range(PAIRS_AT_ONCE, len(points), PAIRS_AT_ONCE), len(points)]
        found = (look for look in looks if decisions[look] != "undecided")
        stop = next(found, len(points))
        return decisions[stop], stop

    def test(
        self, values: Values, *, asked: int, available: int, worst: Values | None = None
    ) -> SequentialTest:
        """Return the test result for the values of the judged pairs.

        `asked` is the number of judged pairs, and `available` the number of all pairs. For `worst`
        see `decide`.
        """
        return SequentialTest(
            least=self.least,
            alpha=self.alpha,
            evidence=float(np.exp(min(self._log_evidence(worst or values)[-1], LARGEST_LOG))),
            decided=self.decide(values, worst),
            asked=asked,
            available=available,
        )

    def least_prompts(self) -> int:
        """Return the smallest number of prompts that gives "better" if the candidate wins all."""
        return bisect_left(
            range(2**40), -np.log(self.alpha), key=lambda wins: self._evidence_of(wins, losses=0)
        )

    def least_wins(self, prompts: int) -> int:
        """Return how many of N prompts must be won, and the others lost, for "better".

        If N prompts are too few even if all are won, return N + 1.
        """
        return bisect_left(
            range(prompts + 1),
            -np.log(self.alpha),
            key=lambda wins: self._evidence_of(wins, losses=prompts - wins),
        )

    def _evidence_of(self, wins: int, *, losses: int) -> float:
        """Return the log of the capital after wins and losses, see `log_capitals`."""
        least = max(self.least, SMALLEST_RATE)
        logs = wins * np.log1p(BETS * (1 - least) / least) + losses * np.log1p(-BETS)
        return float(logsumexp(logs) - np.log(len(BETS)))

    def _decisions(self, values: Values) -> list[Decided]:
        """Return the decision before the first value and after each value."""
        return [
            "better" if better else "not better" if worse else "undecided"
            for better, worse in zip(self._is_better(values), self._is_worse(values), strict=True)
        ]

    def _is_better(self, values: Values) -> NDArray[np.bool_]:
        return self._log_evidence(values) >= -np.log(self.alpha)

    def _is_worse(self, values: Values) -> NDArray[np.bool_]:
        if self.gain is None:
            return np.zeros(len(values.values) + 1, bool)
        against = log_capitals(-values.values, -self.gain, -values.highest)
        return against >= -np.log(FUTILE_ALPHA)

    def _log_evidence(self, values: Values) -> Array:
        return log_capitals(values.values, max(self.least, SMALLEST_RATE), values.lowest)


@dataclass(frozen=True, kw_only=True)
class DecidedComparison:
    """The pairs that a judge compared until their win rate was decided."""

    comparison: Comparison

    positions: list[int]
    """Position of each pair among all pairs."""

    test: SequentialTest

    people: PeopleAndJudge | None
    """The win rate with people's labels; None if the labels did not decide."""


def compare_until_decided(
    judge: Judge,
    prompts: Sequence[JudgedPrompt],
    candidates: Sequence[str],
    opponents: Sequence[str],
    rule: StoppingRule,
    *,
    labels: Labels | None = None,
    is_conclusive: Callable[[Comparison], bool] = lambda comparison: True,
    seed: int,
) -> DecidedComparison:
    """Compare pairs of answers in a random order, in batches, until the rule decides.

    Pairs with equal prompts are in the same batch. After the decision "better", further batches are
    judged while `is_conclusive` returns False, because one or two invalid verdicts may be too large
    a fraction of the first batch. The test is valid for any number of pairs. If the result is
    conclusive, missing verdicts count as losses for the decision "better". With `labels`, people's
    labels and the judge's verdicts decide together.
    """
    judged: list[Comparison] = []
    order: list[int] = []
    # People may have labeled the pairs that an earlier run judged first. Another random order
    # spreads these labels over all batches.
    for batch in _batches(prompts, [seed] if labels is None else [seed, 1]):
        judged.append(
            compare(
                judge,
                [prompts[n] for n in batch],
                [candidates[n] for n in batch],
                [opponents[n] for n in batch],
            )
        )
        order += batch
        asked = joined(judged, range(len(order)))
        conclusive = is_conclusive(asked)
        values = Values(values_of_prompts(asked)) if labels is None else labels.values(asked)
        worst = values
        # An inconclusive result promotes no policy, so its evidence is that of the verdicts alone.
        if labels is None and conclusive:
            worst = Values(values_of_prompts(asked, missing=POINTS["second"]))
        decided = rule.decide(values, worst)
        if decided == "not better" or (decided == "better" and conclusive):
            break
    return DecidedComparison(
        comparison=joined(judged, order),
        positions=sorted(order),
        test=rule.test(values, asked=len(order), available=len(prompts), worst=worst),
        people=None if labels is None else labels.rate(asked),
    )


def promoted_share(values: Array, rule: StoppingRule, *, weeks: int = WEEKS, seed: int) -> float:
    """Return the fraction of simulated weeks in which a rule finds the candidate better.

    Each week draws N of the N values with replacement. Each drawn value x becomes 1 - x with
    probability 1/2, because candidate and opponent are the same policy and may be exchanged.

    Args:
        values: points (N,) of the candidate in [0, 1], one for each prompt.
        rule: rule of the gate.
        weeks: number of simulated weeks.
        seed: seed of the draws.
    """
    rng = np.random.default_rng(seed)
    promoted = 0
    for _ in range(weeks):
        drawn = rng.choice(values, len(values))
        drawn = np.where(rng.uniform(size=len(values)) < 0.5, drawn, 1 - drawn)
        promoted += rule.first_decision(drawn)[0] == "better"
    return promoted / weeks


def _batches(prompts: Sequence[JudgedPrompt], seed: Sequence[int]) -> Iterator[list[int]]:
    """Yield the positions of at least PAIRS_AT_ONCE pairs at a time, in a random order."""
    positions: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        positions.setdefault(shown_prompt(prompt), []).append(number)
    groups = list(positions.values())
    batch: list[int] = []
    for number in np.random.default_rng(seed).permutation(len(groups)):
        batch += groups[number]
        if len(batch) >= PAIRS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
