"""A tiny task whose topics drift: the topics that users ask about change from month to month.

A prompt has words of one topic. In an answer, the words w10 to w13 count 1 in each topic, and the
two words that belong to the topic of the prompt count 2. The flow does not know this rule, except
through labels, judgments and its judge. All words of random answers have three characters, so that
the length of a word does not tell whether it is good.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from random import Random

import numpy as np

TOPICS = 6

COMMON = range(10, 14)
"""Numbers of the words that are good in answers to all prompts."""

OWN_WORDS, FIRST_OWN = 2, 14
"""How many words are good in answers to one topic, and the number of the first such word."""

TOPIC_WORDS, FIRST_OF_TOPICS = 30, 60
"""Of how many words the prompts of a topic are made, and the number of the first such word."""

WORDS = FIRST_OF_TOPICS + TOPICS * TOPIC_WORDS
"""Number of words that the policy must know: w0, w1, and so on."""

PROMPT_WORDS, ANSWER_WORDS = 6, 6

LIKED_FROM = 5
"""Least value of an answer that users like."""

WRONG = 0.1
"""Share of the opinions of users and of the judge that are the opposite of the rule's."""

OPPOSITE = {"first": "second", "second": "first", "tie": "tie"}


def value(prompt: str, answer: str) -> int:
    """Return what an answer is worth by the hidden rule."""
    first = FIRST_OWN + OWN_WORDS * topic_of(prompt)
    own = range(first, first + OWN_WORDS)
    numbers = [int(number) for number in re.findall(r"\bw(\d+)\b", answer)]
    return sum((number in COMMON) + 2 * (number in own) for number in numbers)


def topic_of(prompt: str) -> int:
    """Return the topic of a prompt, from 0."""
    first = re.findall(r"\bw(\d+)\b", prompt)[0]
    return (int(first) - FIRST_OF_TOPICS) // TOPIC_WORDS


def traffic(part: float) -> list[float]:
    """Return the share of each topic in the prompts, after this part of the year, from 0 to 1."""
    center = (TOPICS - 1) * part
    weights = [math.exp(-((topic - center) ** 2) / 2) for topic in range(TOPICS)]
    return [weight / sum(weights) for weight in weights]


def draw_prompts(lots: Random, shares: Sequence[float], count: int) -> list[str]:
    """Return different prompts, of topics with these shares."""
    found = dict[str, None]()
    while len(found) < count:
        (topic,) = lots.choices(range(TOPICS), shares)
        first = FIRST_OF_TOPICS + TOPIC_WORDS * topic
        words = (first + lots.randrange(TOPIC_WORDS) for _ in range(PROMPT_WORDS))
        found[" ".join(f"w{word}" for word in words)] = None
    return list(found)


def random_answer(lots: Random) -> str:
    """Return an answer of random words, good and bad ones."""
    return " ".join(f"w{lots.randrange(10, FIRST_OF_TOPICS)}" for _ in range(ANSWER_WORDS))


def true_label(prompt: str, first: str, second: str) -> str:
    """Return which answer is better by the hidden rule: first, second or tie."""
    one, other = value(prompt, first), value(prompt, second)
    return "tie" if one == other else "first" if one > other else "second"


def true_win_rate(
    prompts: Sequence[str], answers: Sequence[str], others: Sequence[str]
) -> np.ndarray:
    """Return the points (N,) of answers against others by the hidden rule; a tie is half a win."""
    points = {"first": 1.0, "tie": 0.5, "second": 0.0}
    triples = zip(prompts, answers, others, strict=True)
    return np.array([points[true_label(*triple)] for triple in triples])


def label(who: str, prompt: str, first: str, second: str) -> str:
    """Return the label that somebody gives a pair: the same answer in both orders."""
    true = true_label(prompt, first, second)
    return OPPOSITE[true] if _is_wrong(who, prompt, *sorted((first, second))) else true


def likes(user: str, prompt: str, answer: str) -> bool:
    """Return whether a user likes an answer."""
    return (value(prompt, answer) >= LIKED_FROM) != _is_wrong(user, prompt, answer)


def judge(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Compare pairs of answers, with the judge's own mistakes."""
    return [label("judge", prompt, *pair) for prompt, pair in zip(prompts, pairs, strict=True)]


def _is_wrong(*texts: str) -> bool:
    """Return whether somebody is wrong about these texts: always the same for the same texts."""
    digest = hashlib.sha256("\0".join(texts).encode()).digest()
    return int.from_bytes(digest[:4]) < WRONG * 2**32
