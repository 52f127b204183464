"""How often a reward model scores the response that people prefer above the other one."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from math import floor, log10

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binom
from sklearn.metrics import roc_auc_score

from pipeline.inputs.preference_pairs import LabelledPair
from pipeline.reward_validation.rates import Array, Rate, equal_parts, hits, measure_rate
from ppo_core.errors import DataError

ANCHORS = {"1B": 0.628, "2.8B": 0.669, "6.9B": 0.689}
"""Accuracy of reward models of these sizes on the validation pairs of TL;DR (arXiv:2403.17031)."""

MOST_THRESHOLDS = 5
"""Most thresholds of people's margin that accuracy is given at."""


@dataclass(frozen=True, kw_only=True)
class Ties:
    """What the model makes of pairs between which people saw no difference."""

    n: int
    """Ties with two different texts; of twice the same text the margin is 0 by itself."""

    identical: int
    """Ties of twice the same text, which are in none of these figures."""

    margin: float | None
    """Mean distance of the two scores of a tie; None without ties."""

    decided_margin: float
    """Mean distance of the two scores of the pairs that people decided."""

    auc: float | None
    """Probability that the scores of a decided pair lie further apart than those of a tie; None
    without ties."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far people agree with each other on the pairs that several of them voted on."""

    mean: float
    """Mean share of a pair's votes that its most frequent opinion got."""

    by_chance: float
    """What that mean would be if every vote were the toss of a coin: 0.75 for two votes a pair."""

    n: int
    """Pairs with several votes, ties among them."""


@dataclass(frozen=True, kw_only=True)
class Accuracy(Rate):
    """A reward model's accuracy on held-out pairs that are no ties, and what to hold it against."""

    margin_of: str
    """Whose margin `by_margin` goes by: `people`, or `model` where people's is not known."""

    by_margin: dict[str, Rate]
    """The pairs that people rated further apart than each threshold; or the quarters of the pairs
    by the distance of the model's own scores."""

    by_category: dict[str, Rate]
    """The pairs of each category, the largest first; empty if there is none."""

    longer: Rate
    """The same pairs, if the response with more characters were always called the better one."""

    random: float = 0.5
    """The same pairs, if a coin were tossed."""

    anchors: dict[str, float] = field(default_factory=lambda: dict(ANCHORS))
    """Published accuracies by the size of the model."""

    ties: Ties
    """The pairs that are not in `n`."""

    people: Agreement | None
    """How far people agree, the most that can be asked of a model; None without second votes."""


def measure_accuracy(
    chosen_scores: ArrayLike, rejected_scores: ArrayLike, pairs: Sequence[LabelledPair]
) -> Accuracy:
    """The accuracy on the pairs that people decided, whole and in parts.

    Args:
        chosen_scores: (N,), finite.
        rejected_scores: (N,), finite.
        pairs: N pairs that the model was not trained on.

    Raises:
        DataError: every pair is a tie, or there is none.
    """
    decided = np.array([not pair.tie for pair in pairs], dtype=bool)
    if not decided.any():
        raise DataError(
            f"None of the {len(pairs)} held-out pairs has a preferred response, so nothing can be "
            "said of the reward model. Add preferences that are no ties."
        )
    margins = np.asarray(chosen_scores, dtype=float) - np.asarray(rejected_scores, dtype=float)
    decided_pairs = [pair for pair in pairs if not pair.tie]
    longer_by = [len(pair.chosen) - len(pair.rejected) for pair in decided_pairs]
    right = hits(margins[decided])
    margin_of, by_margin = _by_margin(margins[decided], decided_pairs)
    return Accuracy(
        **asdict(measure_rate(right)),
        margin_of=margin_of,
        by_margin=by_margin,
        by_category=_by_category(right, decided_pairs),
        longer=measure_rate(hits(longer_by)),
        ties=_measure_ties(margins, decided, pairs),
        people=_measure_agreement(pairs),
    )


def _by_margin(margins: Array, pairs: Sequence[LabelledPair]) -> tuple[str, dict[str, Rate]]:
    """Whose margins divide the pairs, and the accuracy on each part."""
    rated = np.array([np.nan if pair.margin is None else pair.margin for pair in pairs])
    right = hits(margins)
    if thresholds := _thresholds(rated[~np.isnan(rated)]):
        return "people", {
            f"> {least:g}": measure_rate(right[rated > least]) for least in thresholds
        }
    sizes = np.abs(margins)
    return "model", {
        f"quarter {number} of the model's margins, up to {sizes[part].max():.3g}": measure_rate(
            right[part]
        )
        for number, part in enumerate(equal_parts(sizes, 4), start=1)
    }


def _thresholds(margins: Array) -> list[float]:
    """A few round thresholds from the least margin up, or from 0, each leaving fewer pairs.

    The last one leaves a tenth of the pairs, or its interval would say nothing.
    """
    if margins.size == 0:
        return []
    least, most = max(margins.min(), 0.0), np.quantile(margins, 0.9)
    if least >= most:
        return []
    unit = 10.0 ** floor(log10(most - least))
    for step in (0.2 * unit, 0.5 * unit, unit, 2 * unit, 5 * unit):
        multiples = step * np.arange(np.ceil(least / step), np.ceil(most / step))
        # Of thresholds that leave the same pairs the lowest stays: it is written last.
        by_left = {int((margins > value).sum()): float(value) for value in multiples[::-1]}
        by_left.pop(0, None)  # Rounded down, a multiple can be the largest margin itself.
        if len(by_left) <= MOST_THRESHOLDS:
            break
    return sorted(by_left.values())


def _by_category(right: Array, pairs: Sequence[LabelledPair]) -> dict[str, Rate]:
    categories = np.array([pair.category or "" for pair in pairs])
    rates = {str(name): measure_rate(right[categories == name]) for name in np.unique(categories)}
    rates.pop("", None)
    return dict(sorted(rates.items(), key=lambda item: -item[1].n))


def _measure_ties(
    margins: Array, decided: NDArray[np.bool_], pairs: Sequence[LabelledPair]
) -> Ties:
    different = np.array([pair.chosen != pair.rejected for pair in pairs])
    tied = ~decided & different
    sizes = np.abs(margins)
    exist = bool(tied.any())
    return Ties(
        n=int(tied.sum()),
        identical=int((~different).sum()),
        margin=float(sizes[tied].mean()) if exist else None,
        decided_margin=float(sizes[decided].mean()),
        auc=float(roc_auc_score(decided[different], sizes[different])) if exist else None,
    )


def _measure_agreement(pairs: Sequence[LabelledPair]) -> Agreement | None:
    several = [pair for pair in pairs if pair.agreement is not None]
    if not several:
        return None
    return Agreement(
        mean=float(np.mean([pair.agreement for pair in several])),
        by_chance=float(np.mean([_chance_agreement(pair.votes) for pair in several])),
        n=len(several),
    )


@cache
def _chance_agreement(votes: int) -> float:
    """Mean share of the more frequent side of so many tosses of a coin."""
    heads = np.arange(votes + 1)
    return binom.pmf(heads, votes, 0.5) @ np.maximum(heads, votes - heads) / votes
