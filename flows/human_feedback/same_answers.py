"""Find opinions on equal answers: repetitions by one user, and contradictions between users."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from human_feedback.opinions import LeftOut, Opinion

AnswerKey: TypeAlias = tuple[str, frozenset[str]]
"""The prompt as JSON, and the one or two answers of an opinion."""


def answer_key(opinion: Opinion) -> AnswerKey:
    """Return a key that is equal for all opinions on the same prompt and answers."""
    texts = (opinion.liked, opinion.disliked)
    return json.dumps(opinion.prompt), frozenset(text for text in texts if text is not None)


def without_repetitions(opinions: Sequence[Opinion]) -> tuple[list[Opinion], list[LeftOut]]:
    """Return the last opinion of each user on equal answers, and the earlier opinions as left out.

    Opinions without a user id may come from different users. They count as repetitions only if they
    have the same source: one trace, or one row of a file.
    """
    last: dict[tuple[AnswerKey, str], Opinion] = {}
    left_out = []
    for one in sorted(
        opinions, key=lambda one: (one.time is not None, one.time and one.time.timestamp())
    ):
        key = (answer_key(one), one.user or one.source)
        if key in last:
            earlier = last[key]
            what = "same again" if earlier.liked == one.liked else "opposite later"
            left_out.append(LeftOut(earlier.source, f"the same user said the {what}", one.user))
        last[key] = one
    return list(last.values()), left_out


def count_contradictions(opinions: Sequence[Opinion]) -> int:
    """Return the number of answers, or pairs of answers, on which users disagree."""
    liked: dict[AnswerKey, set[str | None]] = defaultdict(set)
    for one in opinions:
        liked[answer_key(one)].add(one.liked)
    return sum(len(found) > 1 for found in liked.values())
