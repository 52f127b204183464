"""People who label stories by another lexicon than the judge: the happier text wins by AFINN."""

from collections.abc import Sequence

from afinn import Afinn

from tests.helpers.vader_judge import FEWEST_WORDS


def people(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Compare the sums of the words' scores; a text without a story loses."""
    lexicon = Afinn()

    def grade(text: str) -> tuple[bool, float]:
        return len(text.split()) >= FEWEST_WORDS, lexicon.score(text)

    def compare(first: str, second: str) -> str:
        one, other = grade(first), grade(second)
        if one == other:
            return "tie"
        return "first" if one > other else "second"

    return [compare(first, second) for first, second in pairs]
