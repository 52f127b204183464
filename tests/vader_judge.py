"""A judge for stories: the happier text wins, by the rule-based scores of vaderSentiment."""

from collections.abc import Sequence

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


def judge(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Compare the compound scores of the two answers to each prompt."""
    analyzer = SentimentIntensityAnalyzer()

    def compare(first: str, second: str) -> str:
        difference = (
            analyzer.polarity_scores(first)["compound"]
            - analyzer.polarity_scores(second)["compound"]
        )
        if difference == 0:
            return "tie"
        return "first" if difference > 0 else "second"

    return [compare(first, second) for first, second in pairs]
