"""Both orders of every pair; and the judges that the tests of the figures ask."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from pipeline.evaluation.compare_in_both_orders import Comparison, compare, valid_pairs
from pipeline.judges.verdict import Verdict
from ppo_core.errors import DataError


@dataclass(frozen=True)
class RuleJudge:
    """A judge by a rule: prompt, first and second answer to a winner."""

    rule: Callable[[str, str, str], str]
    name: str = "rule"
    version: str = "1"
    members: tuple[str, ...] = ()

    def __call__(self, prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        return [
            Verdict(self.rule(prompt, first, second))
            for prompt, (first, second) in zip(prompts, pairs, strict=True)
        ]


def longer(prompt: str, first: str, second: str) -> str:
    if len(first) == len(second):
        return "tie"
    return "first" if len(first) > len(second) else "second"


def judged(
    straight: Sequence[str], back: Sequence[str] | None = None, prompts: Sequence[str] = (), **texts
) -> Comparison:
    """A comparison with these verdicts in words of the straight pair, the same in both orders."""
    count = len(straight)
    return Comparison(
        prompts=tuple(prompts or map(str, range(count))),
        candidates=tuple(texts.get("candidates", ["c"] * count)),
        opponents=tuple(texts.get("opponents", ["o"] * count)),
        straight=tuple(map(Verdict, straight)),
        swapped=tuple(map(Verdict, straight if back is None else back)),
        judge="j",
    )


@pytest.mark.parametrize(
    ("one", "other", "outcome", "flipped"),
    [
        ("first", "first", "first", False),
        ("second", "second", "second", False),
        ("tie", "tie", "tie", False),
        ("first", "second", "tie", True),
        ("second", "first", "tie", True),
        ("first", "tie", "tie", False),
        ("tie", "second", "tie", False),
        ("invalid", "first", "invalid", False),
        ("second", "invalid", "invalid", False),
        ("invalid", "invalid", "invalid", False),
        ("tie", "invalid", "invalid", False),
    ],
)
def test_a_pair_is_won_only_if_both_orders_agree(one, other, outcome, flipped):
    comparison = judged([one], [other])
    assert comparison.outcomes == (outcome,)
    assert comparison.flipped == (flipped,)


def test_the_judge_is_asked_once_for_all_pairs_in_each_order():
    calls = []

    class Listening(RuleJudge):
        def __call__(self, prompts, pairs):
            calls.append((list(prompts), list(pairs)))
            return super().__call__(prompts, pairs)

    comparison = compare(Listening(longer), ["p", "q"], ["aa", "b"], ["c", "dd"])
    assert calls == [
        (["p", "q"], [("aa", "c"), ("b", "dd")]),
        (["p", "q"], [("c", "aa"), ("dd", "b")]),
    ]
    assert comparison.outcomes == ("first", "second")
    assert comparison.judge == "rule"
    assert (comparison.prompts, comparison.candidates, comparison.opponents) == (
        ("p", "q"),
        ("aa", "b"),
        ("c", "dd"),
    )


def test_the_swapped_verdicts_are_kept_in_the_words_of_the_straight_pair():
    def explain(prompts, pairs):
        votes = (Verdict("first"), Verdict("tie"))
        return [Verdict("first", 0.75, f"liked {pairs[0][0]}", votes)]

    class Explaining(RuleJudge):
        def __call__(self, prompts, pairs):
            return explain(prompts, pairs)

    comparison = compare(Explaining(longer, members=("m", "n")), ["p"], ["a"], ["b"])
    (straight,), (back,) = comparison.straight, comparison.swapped
    assert (straight.winner, straight.probability, straight.reason) == ("first", 0.75, "liked a")
    assert (back.winner, back.probability, back.reason) == ("second", 0.25, "liked b")
    assert [vote.winner for vote in back.votes] == ["second", "tie"]
    assert comparison.members == ("m", "n")


def test_invalid_pairs_are_left_out_and_nothing_but_them_is_refused():
    assert valid_pairs(judged(["first", "invalid", "tie"])) == [0, 2]
    with pytest.raises(DataError, match=r"judge j gave no verdict for 2 of 2 pairs.*Check that"):
        valid_pairs(judged(["invalid", "invalid"]))


def test_where_no_pair_is_valid_a_reason_of_the_judge_is_shown():
    silent, talking = Verdict("invalid"), Verdict("invalid", reason="too long")
    mixed = replace(judged(["invalid"]), straight=(silent,), swapped=(talking,))
    with pytest.raises(DataError, match="The first invalid verdict has this reason: too long"):
        valid_pairs(mixed)
    with pytest.raises(DataError, match="No invalid verdict has a reason"):
        valid_pairs(judged(["invalid"]))
