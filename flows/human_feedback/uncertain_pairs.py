"""The pairs of answers that a person's label tells most about."""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from pipeline.evaluation.rates import Array
from pipeline.inputs.contamination import find_copies, text_of
from ppo_core.data.chat_template import Messages

MOST_OVERLAP = 0.5
"""Largest fraction of a prompt's n-grams that may be in the prompt of another pair."""


class Pair(NamedTuple):
    """Two answers to one prompt."""

    prompt: str | Messages
    first: str
    second: str

    deviation: float
    """Standard deviation of P(first is better than second) over the reward models."""


def preference_variance(scores: Array) -> Array:
    """Return the variance (N, K, K) of the preference between two answers over M reward models.

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
    """Return the pair of each prompt with the largest variance, of `count` prompts at most.

    Prompts come in the order of the variance. A prompt that resembles an earlier one is left out.

    Args:
        prompts: N prompts.
        answers: K answers to each prompt.
        scores: their scores (N, K, M) by M reward models.
        count: maximum number of pairs.
    """
    variance = preference_variance(scores)
    best = variance.reshape(len(prompts), -1).argmax(axis=1)
    found = []
    for row, place in enumerate(best):
        first, second = divmod(int(place), variance.shape[1])
        texts = answers[row][first], answers[row][second]
        found.append(Pair(prompts[row], *texts, float(variance[row, first, second]) ** 0.5))
    # Where all models agree, the pair is an answer with itself.
    found = [pair for pair in found if pair.first != pair.second]
    return _first(count, sorted(found, key=lambda pair: -pair.deviation))


def random_pairs(
    prompts: Sequence[str | Messages], answers: Sequence[Sequence[str]], count: int, seed: int
) -> list[Pair]:
    """Return two different answers to each of `count` prompts at most, drawn at random.

    A prompt that resembles an earlier one is left out. For `prompts` and `answers` see
    `uncertain_pairs`; the deviation of the pairs is not known, and 0.
    """
    generator = np.random.default_rng(seed)
    found = []
    for row in generator.permutation(len(prompts)):
        different = list(dict.fromkeys(answers[row]))
        if len(different) > 1:
            first, second = generator.choice(len(different), 2, replace=False)
            found.append(Pair(prompts[row], different[first], different[second], 0.0))
    return _first(count, found)


def _first(count: int, pairs: Sequence[Pair]) -> list[Pair]:
    """Return the first `count` pairs whose prompts do not resemble an earlier prompt."""
    kept: list[Pair] = []
    for pair in _with_new_prompts(pairs):
        if len(kept) == count:
            break
        kept.append(pair)
    return kept


def _with_new_prompts(pairs: Sequence[Pair]) -> Iterator[Pair]:
    exact, texts = set(), list[str]()
    for pair in pairs:
        key = json.dumps(pair.prompt)
        if key not in exact and not find_copies([pair.prompt], [texts], MOST_OVERLAP):
            exact.add(key)
            texts.append(text_of(pair.prompt))
            yield pair
