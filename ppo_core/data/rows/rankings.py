"""Make preferences from ranked lists, and from single judgments of responses to the same prompt."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import combinations
from typing import Any, TypeAlias

from ppo_core.config.field_checks import is_finite
from ppo_core.data.rows.dialogues import as_response
from ppo_core.data.rows.messages import plain_messages
from ppo_core.data.rows.row_error import RowError

MAX_RANKED = 16
"""Maximum number of responses of a ranked list that are compared. The number of pairs grows with
the square of this number, so a prompt with many responses would outweigh other prompts."""

MAX_PAIRS = MAX_RANKED * (MAX_RANKED - 1) // 2
"""Maximum number of pairs from a prompt's single judgments: as many as a ranked list can give."""

_Ranked: TypeAlias = tuple[float, str]
"""Quality of a response (a larger number is better), and the response."""


def pairs_of_ranking(
    responses: Any, ranks: Any = None, scores: Any = None
) -> Iterator[tuple[str, str, bool]]:
    """Yield the better response, the worse response, and whether they tie, for each pair.

    Two responses tie if they are equally good or have the same text.

    If there are more than `MAX_RANKED` responses, only `MAX_RANKED` of them are paired: the best,
    the worst, and responses at equal steps between these two.

    Args:
        responses: texts, messages, or mappings with the keys `response` and `overall_score`.
        ranks: rank of each response; the smallest rank is the best.
        scores: score of each response; the largest score is the best.

    Raises:
        RowError: there are fewer than two responses, or a response has no rank or score.
    """
    if not isinstance(responses, list) or len(responses) < 2:
        raise RowError("without a list of at least two responses")
    if ranks is None and scores is None:
        name, values = "overall_score", [_of_mapping(one, "overall_score") for one in responses]
    else:
        name, values = ("scores", scores) if ranks is None else ("ranks", ranks)
    if not isinstance(values, list) or len(values) != len(responses):
        raise RowError(f"without a list in {name} of as many numbers as there are responses")
    if not all(_is_number(value) for value in values):
        raise RowError(f"without a finite number for each response in {name}")
    sign = -1 if name == "ranks" else 1
    ranked = [(sign * value, _response(one)) for value, one in zip(values, responses, strict=True)]
    for (better, chosen), (worse, rejected) in combinations(_spread(ranked), 2):
        yield chosen, rejected, better == worse or chosen == rejected


def _spread(ranked: Sequence[_Ranked]) -> list[_Ranked]:
    """Return at most `MAX_RANKED` responses from best to worst, at equal steps in the ranking."""
    ordered = sorted(ranked, key=lambda one: -one[0])
    if len(ordered) <= MAX_RANKED:
        return ordered
    step = (len(ordered) - 1) / (MAX_RANKED - 1)
    return [ordered[round(number * step)] for number in range(MAX_RANKED)]


def _response(given: Any) -> str:
    text = _of_mapping(given, "response")
    return as_response(plain_messages(given if text is None else text), "responses")


def _of_mapping(given: Any, key: str) -> Any:
    return given.get(key) if isinstance(given, Mapping) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)


# --- Single judgments --------------------------------------------------------------


@dataclass
class _Judged:
    """The judgments of one prompt, as positions in the sequence of all judgments."""

    preferred: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of a preferred and a rejected judgment, at most `MAX_PAIRS` pairs.

        If more pairs are possible, the preferred judgments, or the first `MAX_PAIRS` of them, are
        used about equally often. No pair occurs twice.
        """
        first, second = len(self.preferred), len(self.rejected)
        for number in range(min(first * second, MAX_PAIRS)):
            turn, place = divmod(number, first)
            yield self.preferred[place], self.rejected[(place + turn) % second]


def pairing(
    judgements: Iterable[Mapping[str, Any]], take: Callable[[int], Mapping[str, Any]]
) -> Callable[[Sequence[Mapping[str, Any]]], Iterator[list[dict[str, Any]] | RowError | None]]:
    """Return a function that converts consecutive batches of judgments to preferences.

    The function returns all pairs of a prompt at the prompt's first judgment, so no later split of
    the data set separates these pairs. If a prompt has only preferred or only rejected responses,
    the function returns a RowError for each judgment of the prompt.

    Args:
        judgements: rows with `prompt`, `completion`, `label`, and optionally category and source.
        take: function that returns the judgment at a position.
    """
    judged: dict[bytes, _Judged] = {}
    done = set()

    def pair(chosen: Mapping[str, Any], rejected: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompt": chosen["prompt"],
            "chosen": chosen["completion"],
            "rejected": rejected["completion"],
            "margin": None,
            "tie": chosen["completion"] == rejected["completion"],
            "category": chosen["category"],
            "source": chosen["source"],
            "annotator": None,
        }

    def convert(
        batch: Sequence[Mapping[str, Any]],
    ) -> Iterator[list[dict[str, Any]] | RowError | None]:
        # Read the judgments only here: `convert` is not called if the pairs are in the cache.
        if not judged:
            judged.update(_by_prompt(judgements))
        for row in batch:
            key = _key(row)
            of_prompt = judged[key]
            if not (of_prompt.preferred and of_prompt.rejected):
                missing = "rejected" if of_prompt.preferred else "preferred"
                yield RowError(
                    f"whose prompt has no {missing} completion (column label)",
                    "Add judgments of other completions, or remove these rows.",
                )
            elif key in done:
                yield None
            else:
                done.add(key)
                yield [pair(take(first), take(second)) for first, second in of_prompt.pairs()]

    return convert


def _by_prompt(judgements: Iterable[Mapping[str, Any]]) -> dict[bytes, _Judged]:
    judged: dict[bytes, _Judged] = {}
    for position, row in enumerate(judgements):
        of_prompt = judged.setdefault(_key(row), _Judged())
        (of_prompt.preferred if row["label"] else of_prompt.rejected).append(position)
    return judged


def _key(row: Mapping[str, Any]) -> bytes:
    return sha256(json.dumps(row["prompt"]).encode()).digest()
