"""How long answers are, and how much of them is repetition, in words between spaces.

A text in a script without spaces is one word: its length and repetition cannot be seen here.
"""

from collections.abc import Sequence
from statistics import fmean

from ppo_core.algorithm.repetition import repeated_ngrams


def mean_words(texts: Sequence[str]) -> float:
    """Words of a text, mean over at least one of them."""
    return fmean(len(text.split()) for text in texts)


def repeated_share(texts: Sequence[str], n: int = 3) -> float:
    """Return the share of a text's n-grams of words that are repeats, mean over the texts."""
    return fmean(repeated_ngrams(text.split(), n) for text in texts)
