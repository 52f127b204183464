"""Length and repetition of answers, in words separated by white space.

These statistics do not fit scripts without spaces, where a whole text counts as one word.
"""

from collections.abc import Sequence
from statistics import fmean

from ppo_core.algorithm.repetition import repeated_ngrams


def mean_words(texts: Sequence[str]) -> float:
    """Return the mean number of words per text; `texts` must not be empty."""
    return fmean(len(text.split()) for text in texts)


def repeated_share(texts: Sequence[str], n: int = 3) -> float:
    """Return the mean fraction of word n-grams that repeat an earlier n-gram, over distinct texts.

    Equal texts count once, so that a stock answer does not hide the repetition in other answers.
    """
    return fmean(repeated_ngrams(text.split(), n) for text in dict.fromkeys(texts))
