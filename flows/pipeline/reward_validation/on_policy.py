"""Ask the run's judge whether the reward model chooses well among the policy's own samples."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import comb
from scipy.stats import rankdata

from pipeline.evaluation.compare_in_both_orders import POINTS, PROMPTS_AT_ONCE, compare
from pipeline.evaluation.confidence_interval import mean_interval
from pipeline.evaluation.pair_accuracy import Array, hits, measure_rate
from pipeline.judges.judge_budget import Budget, BudgetError
from pipeline.judges.verdict import Judge, JudgedPrompt
from pipeline.results.reward_report import OnPolicy
from pipeline.reward_validation.samples import powers_below
from ppo_core.errors import DataError

BEST_OF = 4
"""Number k of samples from which the gate takes the best."""


@dataclass(frozen=True)
class ScoredSamples:
    """Samples of the policy for each of M prompts, with their scores."""

    prompts: Sequence[JudgedPrompt]
    texts: Sequence[Sequence[str]]
    """K samples for each of the M prompts."""

    scores: Array
    """The reward model's scores (M, K)."""


@dataclass(frozen=True)
class _Pairs:
    """Samples of M prompts, in P = K // 2 pairs per prompt; all arrays have the shape (M, P, 2)."""

    count: int
    """Number of samples K of each prompt."""

    prompts: Sequence[JudgedPrompt]
    texts: NDArray[np.object_]
    scores: Array
    ranks: Array
    """Rank of each sample among the K samples of its prompt; 1 for the lowest score."""

    def part(self, start: int, stop: int) -> "_Pairs":
        """Return the pairs of the prompts from `start` to `stop`."""
        count, *columns = vars(self).values()
        return _Pairs(count, *(column[start:stop] for column in columns))


def measure_on_policy(
    judge: Judge,
    budget: Budget,
    blocks: Iterable[ScoredSamples],
    *,
    calls_per_question: int,
    least: float,
    seed: int,
    is_clear: Callable[[OnPolicy], bool] | None = None,
) -> OnPolicy | None:
    """Measure how often the judge prefers the samples that the reward model prefers.

    The K samples of a prompt are paired at random, and the judge compares each pair in both orders.
    The judge is asked until the measurement is clear, until all samples are judged, or until the
    budget is too small for the pairs of the next PROMPTS_AT_ONCE prompts. Return None if the budget
    is too small for the first pairs.

    Args:
        judge: the judge of the run.
        budget: counter of the judge's calls and tokens, with their limits.
        blocks: samples with their scores; the next block is taken only if it is needed.
        calls_per_question: number of calls to servers that a question costs; 0 for a free judge.
        least: limit of the gate for the win rate of the best of four.
        seed: seed of the pairs.
        is_clear: function that returns whether the measurement is clear. If None, it is clear when
            the interval of the best of four lies on one side of `least`.

    Raises:
        DataError: the judge gave no verdict on any pair.
    """
    judged: list[_Pairs] = []
    points: list[Array] = []
    found = None
    for part in _parts(blocks, np.random.default_rng(seed)):
        affordable = budget.affordable
        if affordable is not None and part.texts.size * calls_per_question > affordable:
            break
        try:
            points.append(_ask(judge, part))
        # Retries, and questions that are asked again, have spent the rest of the budget.
        except BudgetError:
            break
        judged.append(part)
        found = _measure(judge.name, judged, points, least)
        if not found.low <= least <= found.high if is_clear is None else is_clear(found):
            break
    return found and replace(found, spent=budget.spent({}))


def _parts(blocks: Iterable[ScoredSamples], rng: np.random.Generator) -> Iterator[_Pairs]:
    """Yield the pairs of a few prompts at a time."""
    for block in blocks:
        pairs = _pair_up(block, rng)
        for start in range(0, len(pairs.prompts), PROMPTS_AT_ONCE):
            yield pairs.part(start, start + PROMPTS_AT_ONCE)


def _pair_up(block: ScoredSamples, rng: np.random.Generator) -> _Pairs:
    count = block.scores.shape[1]
    # The ranks of samples with equal scores follow the random order.
    lots = rng.permuted(np.tile(np.arange(count), (len(block.texts), 1)), axis=1)
    scores = np.take_along_axis(block.scores, lots, axis=1)
    texts = np.take_along_axis(np.array(block.texts, dtype=object), lots, axis=1)
    ranks = rankdata(scores, method="ordinal", axis=1).astype(float)
    shape = (len(block.texts), count // 2, 2)
    paired = (part[:, : count // 2 * 2].reshape(shape) for part in (texts, scores, ranks))
    return _Pairs(count, block.prompts, *paired)


def _ask(judge: Judge, pairs: _Pairs) -> Array:
    """Return the points (M, P) of the first sample of each pair; NaN without a verdict.

    A pair of equal texts counts as a tie; the judge is not asked about it.
    """
    firsts, seconds = pairs.texts[..., 0], pairs.texts[..., 1]
    points = np.full(firsts.shape, POINTS["tie"])
    asked = np.argwhere(firsts != seconds)
    if len(asked):
        rows, columns = asked.T
        prompts = [pairs.prompts[row] for row in rows]
        comparison = compare(
            judge, prompts, list(firsts[rows, columns]), list(seconds[rows, columns])
        )
        points[rows, columns] = [POINTS.get(outcome, np.nan) for outcome in comparison.outcomes]
    return points


def _measure(
    judge: str, judged: Sequence[_Pairs], parts: Sequence[Array], least: float
) -> OnPolicy:
    """Return the measurements on all judged pairs; the field `spent` stays empty."""
    points, count = np.concatenate(parts), judged[0].count
    ranks = np.concatenate([pairs.ranks for pairs in judged])
    margins = np.concatenate([pairs.scores[..., 0] - pairs.scores[..., 1] for pairs in judged])
    if np.isnan(points).all():
        raise DataError(
            f"The judge {judge} gave no verdict on {points.size} pairs of the policy's "
            "samples, so the reward model cannot be measured. Check that this judge fits these "
            "prompts."
        )
    best_of = {k: wins_of_best(points, ranks, count, k) for k in powers_below(count)[1:]}
    spread = _largest_value(count, BEST_OF) - 0.5
    low, high = mean_interval(best_of[BEST_OF], lowest=0.5 - spread, highest=0.5 + spread)
    decided = np.abs(np.nan_to_num(points, nan=0.5) - 0.5) > 0
    right = hits(margins[decided] * (points[decided] - 0.5))
    return OnPolicy(
        judge=judge,
        prompts=len(points),
        per_prompt=count,
        pairs=points.size,
        ties=int((points == POINTS["tie"]).sum()),
        invalid=int(np.isnan(points).sum()),
        accuracy=measure_rate(right, np.nonzero(decided)[0]) if right.size else None,
        best_of={str(k): float(values.mean()) for k, values in best_of.items()},
        low=low,
        high=high,
        least=least,
        spent={},
    )


def wins_of_best(points: Array, ranks: Array, count: int, k: int) -> Array:
    """Return for each prompt an unbiased estimate of how often the best of k samples wins.

    Draw k of the K samples at random, and let i be the drawn sample with the highest reward. Let j
    be a random sample of the other K - k samples. Among the K (K - 1) ordered pairs of samples, the
    pair (i, j) has the probability

        w[i, j] = C(r[i] - 1 - [r[j] < r[i]], k - 1) / (C(K, k) (K - k))

    for ranks r = 1 .. K. Now draw an ordered pair (i, j) at random, and let p be the points of i
    against j. The mean of

        1/2 + K (K - 1) (w[i, j] - w[j, i]) (p - 1/2) / 2

    is the win rate of the best sample. The variance is lower than for one direct comparison.

    Args:
        points: points (M, P) of the first sample of P pairs of each prompt; NaN counts as a tie.
        ranks: ranks (M, P, 2) of the two samples of each pair.
        count: number of samples K of each prompt, K > k.
        k: number of samples to choose from.

    Returns:
        Means (M,) over the pairs of each prompt.
    """
    weights = _weight(ranks[..., 0], ranks[..., 1], count, k)
    weights = weights - _weight(ranks[..., 1], ranks[..., 0], count, k)
    return 0.5 + (weights * (np.nan_to_num(points, nan=0.5) - 0.5) / 2).mean(axis=1)


def _weight(rank: Array, other: Array, count: int, k: int) -> Array:
    """Return K (K - 1) w[i, j] for the ranks of i and j."""
    return (
        count
        * (count - 1)
        * comb(rank - 1 - (other < rank), k - 1)
        / (comb(count, k) * (count - k))
    )


def _largest_value(count: int, k: int) -> float:
    """Return the largest value of `wins_of_best`.

    The largest value occurs if each pair has a sample from the upper half of the ranks and a sample
    from the lower half, and the upper sample wins.
    """
    half = count // 2
    lower, upper = np.arange(1.0, half + 1), np.arange(count - half + 1.0, count + 1)
    weights = _weight(upper, lower, count, k) - _weight(lower, upper, count, k)
    return float(0.5 + weights.mean() / 4)
