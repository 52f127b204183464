"""Sample the policy before PPO, and measure the reward model's scores of the samples."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import comb
from scipy.stats import bootstrap

from pipeline.evaluation.pair_accuracy import Array
from pipeline.results.reward_report import References, SampleScores
from pipeline.reward_validation.scores import require_finite
from ppo_core.data.chat_template import Messages
from ppo_core.errors import DataError

QUANTILES = (5, 25, 50, 75, 95)
"""Percentiles of the scores that the report gives."""

NUM_BINS = 30
"""Number of histogram bins, all of equal width."""


def draw_samples(
    answer: Callable[[list[str | Messages]], list[str]],
    prompts: Sequence[str | Messages],
    *,
    samples_per_prompt: int,
) -> list[list[str]]:
    """Return `samples_per_prompt` answers of the policy to each prompt.

    `answer` takes a list of prompts and samples one answer to each of them.
    """
    texts = answer([prompt for prompt in prompts for _ in range(samples_per_prompt)])
    starts = range(0, len(texts), samples_per_prompt)
    return [texts[start : start + samples_per_prompt] for start in starts]


def duplicates(samples: Sequence[Sequence[str]]) -> float:
    """Return the fraction of samples (M, K) that repeat an earlier sample for the same prompt."""
    total = sum(map(len, samples))
    return (total - sum(len(set(group)) for group in samples)) / total


def measure_samples(
    scores: ArrayLike, reference_scores: ArrayLike | None, *, seed: int
) -> SampleScores:
    """Measure the distribution of samples' scores, and the expected score of the best of k.

    Args:
        scores: scores (M, K) of K samples for each of M prompts.
        reference_scores: scores (M,) of the references; None without references.
        seed: seed of the bootstrap.

    Raises:
        DataError: the shapes differ, or a prompt has fewer than two samples.
        ModelError: a score is not finite.
    """
    scores = np.asarray(scores, dtype=float)
    if scores.ndim != 2 or scores.shape[0] < 1 or scores.shape[1] < 2:
        raise DataError(
            f"The scores of samples have the shape {scores.shape}. Without at least two samples "
            "per prompt, their variance is undefined. Draw more samples per prompt."
        )
    require_finite(scores, "samples")
    counts, edges = np.histogram(scores, bins=NUM_BINS)
    return SampleScores(
        prompts=scores.shape[0],
        per_prompt=scores.shape[1],
        mean=float(scores.mean()),
        deviation=float(scores.std(ddof=1)),
        within_prompts=float(np.sqrt(scores.var(axis=1, ddof=1).mean())),
        minimum=float(scores.min()),
        maximum=float(scores.max()),
        quantiles={str(q): float(np.percentile(scores, q)) for q in QUANTILES},
        counts=counts.tolist(),
        edges=edges.tolist(),
        best_of={
            str(k): best_of(scores, k) for k in (*powers_below(scores.shape[1]), scores.shape[1])
        },
        references=None
        if reference_scores is None
        else _compare_references(scores, np.asarray(reference_scores, dtype=float), seed),
    )


def best_of(scores: Array, k: int) -> float:
    """Return the expected highest score of k samples from scores (M, K), averaged over M prompts.

        best[k] = sum_i C(i - 1, k - 1) / C(K, k) * x[i],   x[1] <= ... <= x[K],   k <= K

    x[i] is the highest score in C(i - 1, k - 1) of the C(K, k) subsets of size k. So best[k] is an
    unbiased estimate of the expected highest score of k new samples. Eq. 1 of arXiv:2107.03374 is
    the special case of scores 0 and 1.
    """
    size = scores.shape[1]
    weights = comb(np.arange(size), k - 1) / comb(size, k)
    return float((np.sort(scores, axis=1) @ weights).mean())


def powers_below(limit: int) -> list[int]:
    """Return the powers of 2 from 1 to below `limit`."""
    return [2**i for i in range(limit.bit_length()) if 2**i < limit]


def _compare_references(scores: Array, reference_scores: Array, seed: int) -> References:
    if reference_scores.shape != scores.shape[:1]:
        raise DataError(
            f"The reference scores have the shape {reference_scores.shape}, but the samples are of "
            f"{scores.shape[0]} prompts. Give one reference score for each prompt."
        )
    require_finite(reference_scores, "references")
    above = (1 + np.sign(reference_scores[:, None] - scores)).mean(axis=1) / 2
    low, high = 0.0, 1.0
    if len(above) > 1:
        drawn = bootstrap((above,), np.mean, method="percentile", rng=np.random.default_rng(seed))
        low, high = map(float, drawn.confidence_interval)
    return References(
        mean=float(reference_scores.mean()),
        above_samples=float(above.mean()),
        low=low,
        high=high,
    )
