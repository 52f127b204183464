"""A judge for stories: the happier text wins by the scores of vaderSentiment."""

from collections.abc import Sequence

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

FEWEST_WORDS = 5
"""Minimum words of a story; an empty text is neutral, and would beat a sad story."""


def judge(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Compare the compound scores of the two answers; a text without a story loses."""
    analyzer = SentimentIntensityAnalyzer()

    def grade(text: str) -> tuple[bool, float]:
        tells = len(text.split()) >= FEWEST_WORDS
        return tells, analyzer.polarity_scores(text)["compound"]

    def compare(first: str, second: str) -> str:
        one, other = grade(first), grade(second)
        if one == other:
            return "tie"
        return "first" if one > other else "second"

    return [compare(first, second) for first, second in pairs]
