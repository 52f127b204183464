"""People who label stories by another lexicon than the judge: the happier text wins by AFINN."""

from collections.abc import Sequence

from afinn import Afinn

from tests.helpers.vader_judge import prefer_happier


def people(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Compare the sums of the words' scores; a text without a story loses."""
    return prefer_happier(pairs, Afinn().score)
