"""Measure whether a reward model scores the length of a response instead of its content."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from pipeline.evaluation.pair_accuracy import groups_of, hits, measure_rate
from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.results.reward_report import Lengths


def measure_lengths(
    chosen_scores: ArrayLike,
    rejected_scores: ArrayLike,
    pairs: Sequence[LabeledPair],
    sample_scores: ArrayLike,
    samples: Sequence[Sequence[str]],
) -> Lengths:
    """Measure how scores depend on the lengths of responses.

    Args:
        chosen_scores: finite scores (N,) of the chosen responses.
        rejected_scores: finite scores (N,) of the rejected responses.
        pairs: N held-out pairs.
        sample_scores: finite scores (M, K) of `samples`.
        samples: K responses of the SFT policy to each of M prompts.
    """
    chosen, rejected = np.asarray(chosen_scores, float), np.asarray(rejected_scores, float)
    chosen_lengths = np.array([len(pair.chosen) for pair in pairs])
    rejected_lengths = np.array([len(pair.rejected) for pair in pairs])
    decided = np.array([not pair.tie for pair in pairs])
    right, groups = hits(chosen - rejected), groups_of(pairs)
    shorter = decided & (chosen_lengths < rejected_lengths)
    longer = decided & (chosen_lengths > rejected_lengths)
    within = [
        correlation
        for scores, texts in zip(np.asarray(sample_scores, float), samples, strict=True)
        if (correlation := _correlation(scores, [len(text) for text in texts])) is not None
    ]
    return Lengths(
        correlation=_correlation(
            np.concatenate([chosen, rejected]),
            np.concatenate([chosen_lengths, rejected_lengths]),
        ),
        within_prompts=float(np.mean(within)) if within else None,
        prompts=len(within),
        shorter=measure_rate(right[shorter], groups[shorter]) if shorter.any() else None,
        longer=measure_rate(right[longer], groups[longer]) if longer.any() else None,
    )


def _correlation(scores: ArrayLike, lengths: ArrayLike) -> float | None:
    """Return Spearman's correlation; None if scores or lengths are all equal."""
    if np.ptp(scores) == 0 or np.ptp(lengths) == 0:
        return None
    return float(spearmanr(scores, lengths).statistic)
