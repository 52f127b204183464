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
    """Return the share of a text's word n-grams that occurred earlier in it, mean over the texts.

        (number of n-grams - number of different n-grams) / number of n-grams

    A text of fewer than n + 1 words has 0. This is seq-rep-n of arXiv:1908.04319.
    """
    return fmean(repeated_ngrams(text.split(), n) for text in texts)
