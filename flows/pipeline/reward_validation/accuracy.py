"""Measure how often a reward model scores the preferred response above the rejected one."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from math import floor, log10

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binom
from sklearn.metrics import roc_auc_score

from pipeline.evaluation.pair_accuracy import Array, equal_parts, groups_of, hits, measure_rate
from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.results.reward_report import Accuracy, Agreement, Rate, Ties
from pipeline.reward_validation.scores import TextScorer, score_pairs
from ppo_core.config.placement import placement_for_reading
from ppo_core.config.row_settings import PromptFormat
from ppo_core.errors import DataError
from ppo_core.models.loading import load_reward_model

ANCHORS = {"1B": 0.628, "2.8B": 0.669, "6.9B": 0.689}
"""Accuracy of published reward models by size, on TL;DR's validation pairs (arXiv:2403.17031)."""

MAX_THRESHOLDS = 5
"""Maximum number of entries of `Accuracy.by_margin` if people rated the margins."""


def measure_accuracy(
    chosen_scores: ArrayLike, rejected_scores: ArrayLike, pairs: Sequence[LabeledPair]
) -> Accuracy:
    """Return the accuracy on pairs that are not ties: in total, by margin and by category.

    Args:
        chosen_scores: finite scores (N,) of the chosen responses.
        rejected_scores: finite scores (N,) of the rejected responses.
        pairs: N pairs that the model was not trained on.

    Raises:
        DataError: every pair is a tie, or `pairs` is empty.
    """
    decided = np.array([not pair.tie for pair in pairs], dtype=bool)
    if not decided.any():
        raise DataError(
            f"None of the {len(pairs)} held-out pairs has a preferred response, so the accuracy "
            "of the reward model is undefined. Add held-out pairs that are not ties."
        )
    margins = np.asarray(chosen_scores, dtype=float) - np.asarray(rejected_scores, dtype=float)
    decided_pairs = [pair for pair in pairs if not pair.tie]
    longer_by = [len(pair.chosen) - len(pair.rejected) for pair in decided_pairs]
    right, groups = hits(margins[decided]), groups_of(decided_pairs)
    margin_of, by_margin = _by_margin(margins[decided], decided_pairs)
    return Accuracy(
        **asdict(measure_rate(right, groups)),
        margin_of=margin_of,
        by_margin=by_margin,
        by_category=_by_category(right, decided_pairs),
        longer=measure_rate(hits(longer_by), groups),
        anchors=dict(ANCHORS),
        ties=_measure_ties(margins, decided, pairs),
        people=_measure_agreement(pairs),
    )


def _by_margin(margins: Array, pairs: Sequence[LabeledPair]) -> tuple[str, dict[str, Rate]]:
    """Return `margin_of` and `by_margin` of `Accuracy`."""
    rated = np.array([np.nan if pair.margin is None else pair.margin for pair in pairs])
    right, groups = hits(margins), groups_of(pairs)
    if thresholds := _thresholds(rated[~np.isnan(rated)]):
        return "people", {
            f"> {least:g}": measure_rate(right[rated > least], groups[rated > least])
            for least in thresholds
        }
    sizes = np.abs(margins)
    return "model", {
        f"quarter {number} of the model's margins, up to {sizes[part].max():.3g}": measure_rate(
            right[part], groups[part]
        )
        for number, part in enumerate(equal_parts(sizes, 4), start=1)
    }


def _thresholds(margins: Array) -> list[float]:
    """Return at most MAX_THRESHOLDS round thresholds, in increasing order.

    The thresholds are at least max(smallest margin, 0) and below the 90 % quantile, so that enough
    pairs lie above the last threshold. Fewer pairs lie above each threshold than above the previous
    threshold.
    """
    if margins.size == 0:
        return []
    least, largest = max(margins.min(), 0.0), np.quantile(margins, 0.9)
    if least >= largest:
        return []
    unit = 10.0 ** floor(log10(largest - least))
    for step in (0.2 * unit, 0.5 * unit, unit, 2 * unit, 5 * unit):
        multiples = step * np.arange(np.ceil(least / step), np.ceil(largest / step))
        # Several thresholds may have the same pairs above them. The dict keeps the last of these
        # thresholds, which is the lowest.
        by_left = {int((margins > value).sum()): float(value) for value in multiples[::-1]}
        by_left.pop(0, None)  # Rounding can make a multiple equal to the largest margin.
        if len(by_left) <= MAX_THRESHOLDS:
            break
    return sorted(by_left.values())


def _by_category(right: Array, pairs: Sequence[LabeledPair]) -> dict[str, Rate]:
    categories = np.array([pair.category or "" for pair in pairs])
    groups = groups_of(pairs)
    rates = {
        str(name): measure_rate(right[categories == name], groups[categories == name])
        for name in np.unique(categories)
    }
    rates.pop("", None)
    return dict(sorted(rates.items(), key=lambda item: -item[1].n))


def _measure_ties(margins: Array, decided: NDArray[np.bool_], pairs: Sequence[LabeledPair]) -> Ties:
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


def _measure_agreement(pairs: Sequence[LabeledPair]) -> Agreement | None:
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
    """Return the expected fraction of votes for the majority if `votes` people each toss a coin."""
    heads = np.arange(votes + 1)
    return binom.pmf(heads, votes, 0.5) @ np.maximum(heads, votes - heads) / votes


def measure_model(
    path: str, pairs: Sequence[LabeledPair], *, end_of_text: bool, prompt_format: PromptFormat
) -> Accuracy:
    """Measure the accuracy of a reward model on pairs; see `scores_of_model`."""
    scores = scores_of_model(path, pairs, end_of_text=end_of_text, prompt_format=prompt_format)
    return measure_accuracy(*scores, pairs)


def scores_of_model(
    path: str, pairs: Sequence[LabeledPair], *, end_of_text: bool, prompt_format: PromptFormat
) -> tuple[Array, Array]:
    """Load a reward model in fp32, and return its scores of the pairs; see `score_pairs`.

    Raises:
        ModelError: the model cannot be loaded, or a score is not finite.
    """
    model = load_reward_model(
        path,
        end_of_text=end_of_text,
        prompt_format=prompt_format,
        placement=placement_for_reading(),
    )
    return score_pairs(TextScorer(model), pairs)
