"""A judge for stories, and people who label them: the happier text wins by vaderSentiment."""

import hashlib
from collections.abc import Callable, Sequence

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

FEWEST_WORDS = 5
"""Minimum words of a story; an empty text is neutral, and would beat a sad story."""

WRONG = 26
"""Of 256 pairs, the number that people label wrongly."""


def judge(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Compare the compound scores of the two answers; a text without a story loses."""
    analyzer = SentimentIntensityAnalyzer()
    return prefer_happier(pairs, lambda text: analyzer.polarity_scores(text)["compound"])


def prefer_happier(
    pairs: Sequence[tuple[str, str]], happiness: Callable[[str], float]
) -> list[str]:
    """Prefer the happier story of each pair; a text without a story loses."""

    def grade(text: str) -> tuple[bool, float]:
        return len(text.split()) >= FEWEST_WORDS, happiness(text)

    def compare(first: str, second: str) -> str:
        one, other = grade(first), grade(second)
        if one == other:
            return "tie"
        return "first" if one > other else "second"

    return [compare(first, second) for first, second in pairs]


def people(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Compare as the judge does, with one label in ten wrong; it is so in both orders of a pair."""
    opposite = {"first": "second", "second": "first", "tie": "tie"}
    return [
        opposite[label] if _is_wrong(pair) else label
        for label, pair in zip(judge(prompts, pairs), pairs, strict=True)
    ]


def _is_wrong(pair: tuple[str, str]) -> bool:
    digest = hashlib.sha256("\0".join(sorted(pair)).encode()).digest()
    return digest[0] < WRONG
