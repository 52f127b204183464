"""Length and repetition of answers in words, which are separated by spaces.

A text in a script without spaces counts as one word, so these statistics do not fit it.
"""

from collections.abc import Sequence
from statistics import fmean

from ppo_core.algorithm.repetition import repeated_ngrams


def mean_words(texts: Sequence[str]) -> float:
    """Return the mean number of words of at least one text."""
    return fmean(len(text.split()) for text in texts)


def repeated_share(texts: Sequence[str], n: int = 3) -> float:
    """Return the share of a text's n-grams of words that are repeats, mean over the texts."""
    return fmean(repeated_ngrams(text.split(), n) for text in texts)
