"""Whether a reward model scores the length of a response instead of its content."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from pipeline.inputs.preference_pairs import LabelledPair
from pipeline.reward_validation.rates import Rate, hits, measure_rate


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How scores depend on the length of a response in characters."""

    correlation: float | None
    """Spearman correlation of score and length over all held-out responses; None if all scores or
    all lengths are equal."""

    within_prompts: float | None
    """Mean over prompts of the correlation over the samples of a prompt; None if all scores or all
    lengths are equal in every prompt."""

    prompts: int
    """Prompts in that mean."""

    shorter: Rate | None
    """Accuracy on the pairs whose shorter response is the chosen one; None if there is none."""

    longer: Rate | None
    """Accuracy on the pairs whose longer response is the chosen one; None if there is none."""


def measure_lengths(
    chosen_scores: ArrayLike,
    rejected_scores: ArrayLike,
    pairs: Sequence[LabelledPair],
    sample_scores: ArrayLike,
    samples: Sequence[Sequence[str]],
) -> Lengths:
    """Measure how scores depend on lengths.

    Args:
        chosen_scores: (N,), finite.
        rejected_scores: (N,), finite.
        pairs: the N held-out pairs.
        sample_scores: (M, K), finite.
        samples: K responses of the SFT policy to each of M prompts.
    """
    chosen, rejected = np.asarray(chosen_scores, float), np.asarray(rejected_scores, float)
    chosen_lengths = np.array([len(pair.chosen) for pair in pairs])
    rejected_lengths = np.array([len(pair.rejected) for pair in pairs])
    decided = np.array([not pair.tie for pair in pairs])
    right = hits(chosen - rejected)
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
        shorter=measure_rate(right[shorter]) if shorter.any() else None,
        longer=measure_rate(right[longer]) if longer.any() else None,
    )


def _correlation(scores: ArrayLike, lengths: ArrayLike) -> float | None:
    """Return Spearman's correlation; None if scores or lengths are all equal."""
    if np.ptp(scores) == 0 or np.ptp(lengths) == 0:
        return None
    return float(spearmanr(scores, lengths).statistic)
