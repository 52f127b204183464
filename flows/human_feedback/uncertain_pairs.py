"""Choose the pairs of answers on which reward models differ most, or pairs at random."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit
from sklearn.feature_extraction.text import TfidfVectorizer

from pipeline.evaluation.pair_accuracy import Array
from pipeline.inputs.contamination import text_of
from ppo_core.data.chat_template import Messages

MOST_SIMILAR = 0.8
"""Maximum cosine similarity of the TF-IDF vectors of two prompts that are both labeled."""

SHARED_BY_ALL = 0.1
"""Inverse document frequency of a word that is in all prompts, such as a word of a shared
instruction. scikit-learn uses 1. With 0, prompts that consist of the same words would have zero
vectors."""


class Pair(NamedTuple):
    """Two answers to one prompt."""

    prompt: str | Messages
    first: str
    second: str

    deviation: float = 0.0
    """Standard deviation of P(first is better than second) over the reward models; 0 if unknown."""


def preference_variance(scores: Array) -> Array:
    """Return the variance (N, K, K), over M reward models, of the preference between two answers.

    Each model gives P(answer i is better than answer j) = sigmoid(score_i - score_j) (Bradley and
    Terry, 1952).

    Args:
        scores: scores (N, K, M) of K answers to each of N prompts.
    """
    return expit(scores[:, :, None] - scores[:, None]).var(axis=-1)


def uncertain_pairs(
    prompts: Sequence[str | Messages],
    answers: Sequence[Sequence[str]],
    scores: Array,
    count: int,
) -> list[Pair]:
    """For each of at most `count` prompts, return the pair of answers with the largest variance.

    Prompts with the largest variance come first. A prompt that resembles an earlier prompt is left
    out.

    Args:
        prompts: N prompts.
        answers: K answers to each prompt.
        scores: scores (N, K, M) of the answers by M reward models.
        count: maximum number of pairs.
    """
    variance = preference_variance(scores)
    best = variance.reshape(len(prompts), -1).argmax(axis=1)
    found = []
    for row, place in enumerate(best):
        first, second = divmod(int(place), variance.shape[1])
        texts = answers[row][first], answers[row][second]
        found.append(Pair(prompts[row], *texts, float(variance[row, first, second]) ** 0.5))
    found = [pair for pair in found if pair.deviation > 0 and pair.first != pair.second]
    return first_unlike(sorted(found, key=lambda pair: -pair.deviation), count)


def random_pairs(
    prompts: Sequence[str | Messages], answers: Sequence[Sequence[str]], count: int, seed: int
) -> list[Pair]:
    """Draw at most `count` prompts at random, and two different answers to each prompt.

    A prompt that resembles an earlier prompt is left out. For `prompts` and `answers`, see
    `uncertain_pairs`.
    """
    generator = np.random.default_rng(seed)
    found = []
    for row in generator.permutation(len(prompts)):
        different = list(dict.fromkeys(answers[row]))
        if len(different) > 1:
            first, second = generator.choice(len(different), 2, replace=False)
            found.append(Pair(prompts[row], different[first], different[second]))
    return first_unlike(found, count)


def first_unlike(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """Return the first `count` pairs whose prompts resemble no prompt of an earlier pair."""
    if not pairs:
        return []
    # Keep one-letter words and punctuation as tokens, because a prompt may have no other tokens.
    vectorizer = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]")
    texts = [text_of(pair.prompt) for pair in pairs]
    vectorizer.fit(texts)
    vectorizer.idf_ = vectorizer.idf_ - 1 + SHARED_BY_ALL
    vectors = vectorizer.transform(texts)
    kept: list[int] = []
    for number in range(len(pairs)):
        if len(kept) == count:
            break
        similar = (vectors[kept] @ vectors[number].T).max() if kept else 0.0
        if similar <= MOST_SIMILAR:
            kept.append(number)
    return [pairs[number] for number in kept]
