"""A tiny task whose preferences change: what raters value grows, and can be poisoned.

A text has a value, which the judge reads too: a word w0 to w9 counts 1, a word w10 to w19 counts 2.
"""

import re
from collections.abc import Callable
from random import Random

JUDGE = r"""
import re


def value(text):
    numbers = [int(number) for number in re.findall(r"w(\d+)", text)]
    return sum((number < 10) + 2 * (10 <= number < 20) for number in numbers)


def judge(prompts, pairs):
    return [
        "tie" if value(a) == value(b) else "first" if value(a) > value(b) else "second"
        for a, b in pairs
    ]
"""

Rows = list[dict[str, str]]


def value(text: str) -> int:
    """The value of a text, as raters see it who know both kinds of words."""
    return roughly(text) + sum(10 <= number < 20 for number in _numbers(text))


def roughly(text: str) -> int:
    """The value as the first raters see it: all good words are equal."""
    return sum(number < 20 for number in _numbers(text))


def reversed_value(text: str) -> int:
    """What poisoned preferences prefer."""
    return -value(text)


def rows_of_pairs(seed: int, count: int, rate: Callable[[str], int]) -> Rows:
    """Pairs of which raters prefer the text of higher value; no ties."""
    rng, rows = Random(seed), []
    while len(rows) < count:
        worse, better = sorted((_words(rng, 6), _words(rng, 6)), key=rate)
        if rate(worse) < rate(better):
            rows.append({"prompt": _words(rng, 4), "chosen": better, "rejected": worse})
    return rows


def rows_of_texts(seed: int, count: int, name: str = "") -> Rows:
    """Prompts, with a random text in the column `name` if there is one."""
    rng = Random(seed)
    texts = [{"prompt": _words(rng, 4), name: _words(rng, 6)} for _ in range(count)]
    return [{key: text for key, text in row.items() if key} for row in texts]


def _words(rng: Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(58)}" for _ in range(count))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"w(\d+)", text)]
