"""How long answers are, and how much of them is repetition, in words between spaces.

A text in a script without spaces is one word: its length and repetition cannot be seen here.
"""

from collections.abc import Sequence
from statistics import fmean


def mean_words(texts: Sequence[str]) -> float:
    """Words of a text, mean over at least one of them."""
    return fmean(len(text.split()) for text in texts)


def repeated_share(texts: Sequence[str], n: int = 3) -> float:
    """Share of a text's n-grams of words that occurred before in it, mean over the texts.

        (number of n-grams - number of different n-grams) / number of n-grams

    A text of fewer than n + 1 words has 0. It is the seq-rep-n of arXiv:1908.04319, which
    `ppo_core.algorithm.repetition` computes of tokens.
    """
    return fmean(_share(text.split(), n) for text in texts)


def _share(words: list[str], n: int) -> float:
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return (len(grams) - len(set(grams))) / max(1, len(grams))
