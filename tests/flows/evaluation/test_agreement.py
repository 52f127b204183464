from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pipeline.evaluation.agreement import (
    COST,
    agree_with_people,
    compare_with_annotators,
    doubts_about_judge,
    measure_agreement,
)
from pipeline.evaluation.compare_in_both_orders import compare
from pipeline.evaluation.contests import Contestants, evaluate
from pipeline.inputs.human_labels_to_pairs import Vote
from pipeline.judges.verdict import Verdict
from pipeline.results.evaluation import JudgedContests
from pipeline.settings.evaluation_config import EvaluationConfig
from tests.flows.evaluation.test_compare_in_both_orders import RuleJudge, longer
from tests.helpers.inputs.sample_reports import RULE


@dataclass(frozen=True)
class Ensemble:
    """The vote of rules; its own verdict does not matter here."""

    rules: dict
    name: str = "ensemble"
    version: str = "1"

    @property
    def members(self):
        return tuple(self.rules)

    def __call__(self, prompts, pairs):
        return [
            Verdict("tie", votes=tuple(Verdict(rule(p, *pair)) for rule in self.rules.values()))
            for p, pair in zip(prompts, pairs, strict=True)
        ]


def says(words: str):
    """A rule that knows what it says about the candidate `c` of each prompt: f, s, t, or i."""
    winners = {"f": "first", "s": "second", "t": "tie", "i": "invalid"}
    back = {"first": "second", "second": "first"}

    def rule(prompt, first, second):
        winner = winners[words[int(prompt)]]
        return winner if first == "c" else back.get(winner, winner)

    return rule


def ask(**rules):
    count = max(len(words) for words in rules.values() if isinstance(words, str))
    judge = Ensemble(
        {name: says(words) if isinstance(words, str) else words for name, words in rules.items()}
    )
    return compare(judge, [str(n) for n in range(count)], ["c"] * count, ["o"] * count)


def test_each_judge_has_its_own_outcomes_and_rate():
    result = measure_agreement(
        ask(one="fftsi", other="ssssf", place=lambda *_: "first", mute="iiiii")
    )
    assert result.outcomes == {
        "one": ("first", "first", "tie", "second", "invalid"),
        "other": ("second",) * 4 + ("first",),
        "place": ("tie",) * 5,
        "mute": ("invalid",) * 5,
    }
    # one: (1 + 1 + 1/2 + 0) / 4 valid
    assert result.rates == {"one": 0.625, "other": 0.2, "place": 0.5, "mute": None}


def test_two_judges_agree_as_the_sum_done_by_hand_says():
    # Valid for both: the first 10. They agree on 4 f and 3 s, 7 of 10. By chance, with 6 and 5 f,
    # 4 and 5 s: .6 * .5 + .4 * .5 = .5, so kappa is (.7 - .5) / (1 - .5) = .4
    result = measure_agreement(ask(one="ffffffssssif", other="ffffssfsssfi"))
    (pair,) = result.pairs
    assert (pair.judges, pair.n, pair.share) == (("one", "other"), 10, 0.7)
    assert pair.kappa == pytest.approx(0.4)


def test_every_two_judges_are_compared():
    result = measure_agreement(ask(a="fs", b="ff", c="ss"))
    assert [pair.judges for pair in result.pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert [pair.share for pair in result.pairs] == [0.5, 0.5, 0.0]


def test_fleiss_kappa_matches_the_sum_done_by_hand():
    # Three judges, four pairs (the fifth is not valid for c): fff fff sss ffs.
    # Agreement within pairs: 1, 1, 1, 1/3, mean 5/6. Shares: f 8/12, s 4/12, by chance 4/9 + 1/9.
    # kappa = (5/6 - 5/9) / (1 - 5/9) = 5/8
    result = measure_agreement(ask(a="ffsff", b="ffsff", c="ffssi"))
    assert result.n == 4
    assert result.fleiss_kappa == pytest.approx(5 / 8)


def test_judges_that_toss_coins_agree_by_chance_only():
    rng = np.random.default_rng(0)
    words = ("".join(rng.choice(list("fts"), 3000)) for _ in range(3))
    result = measure_agreement(ask(**dict(zip("abc", words, strict=True))))
    # Deviation of a kappa of 3,000 pairs around 0: sqrt(1/3 * 2/3 / 3000) / (2/3) = 0.013
    for kappa in [result.fleiss_kappa, *(pair.kappa for pair in result.pairs)]:
        assert kappa == pytest.approx(0, abs=0.04)
    for pair in result.pairs:
        assert pair.share == pytest.approx(1 / 3, abs=0.03)


@pytest.mark.filterwarnings("error")
def test_kappa_is_undefined_where_all_say_the_same_one_thing_or_nothing():
    result = measure_agreement(ask(a="fff", b="fff"))
    assert (result.pairs[0].share, result.pairs[0].kappa, result.fleiss_kappa) == (1.0, None, None)
    result = measure_agreement(ask(a="fi", b="if"))
    (pair,) = result.pairs
    assert (pair.n, pair.share, pair.kappa) == (0, None, None)
    assert (result.n, result.fleiss_kappa) == (0, None)
    # One who always says the same, and one who does not: defined, and 0.
    assert measure_agreement(ask(a="fff", b="ffs")).pairs[0].kappa == 0


def rows(*labels: str) -> list[Vote]:
    """Pairs of which the first is longer, then the second, then neither, and so on."""
    texts = [("aa", "b"), ("a", "bb"), ("a", "b")]
    return [
        Vote(prompt=str(n), first=texts[n % 3][0], second=texts[n % 3][1], label=label)
        for n, label in enumerate(labels)
    ]


def test_a_judge_is_measured_against_people_as_the_sum_done_by_hand_says():
    # The judge says f s t f s t, people f s t f f f: they agree on 4 of 6.
    # By chance, people 4 f, 1 s, 1 t and the judge 2 each: (4 * 2 + 1 * 2 + 1 * 2) / 36 = 1/3.
    # kappa = (2/3 - 1/3) / (1 - 1/3) = 1/2
    labels = "first", "second", "tie", "first", "first", "first"
    result = agree_with_people(RuleJudge(longer), rows(*labels))
    assert (result.n, result.invalid, result.judge) == (6, 0, "rule")
    assert result.share == pytest.approx(2 / 3)
    assert result.kappa == pytest.approx(1 / 2)
    assert result.confusion == {
        "first": {"first": 2, "tie": 1, "second": 1},
        "tie": {"first": 0, "tie": 1, "second": 0},
        "second": {"first": 0, "tie": 0, "second": 1},
    }


def test_invalid_verdicts_are_counted_apart_from_disagreement():
    def unsure(prompt, first, second):
        return "invalid" if prompt == "0" else longer(prompt, first, second)

    result = agree_with_people(RuleJudge(unsure), rows("second", "second", "tie"))
    assert (result.n, result.invalid, result.share, result.kappa) == (2, 1, 1.0, 1.0)
    assert sum(sum(counts.values()) for counts in result.confusion.values()) == 2


def test_a_judge_of_position_agrees_with_people_on_ties_only():
    first = RuleJudge(lambda prompt, one, other: "first")
    result = agree_with_people(first, rows("first", "first", "tie"))
    assert result.share == pytest.approx(1 / 3)
    assert result.kappa == 0


@pytest.mark.filterwarnings("error")
def test_agreement_on_one_thing_only_has_no_kappa():
    result = agree_with_people(RuleJudge(lambda *_: "tie"), rows("tie", "tie"))
    assert (result.share, result.kappa) == (1.0, None)


def test_a_judge_that_disagrees_with_people_is_doubted():
    labels = "first", "second", "tie", "first", "first", "first"
    half = agree_with_people(RuleJudge(longer), rows(*labels))
    assert doubts_about_judge(half, min_kappa=0.49) == []
    (doubt,) = doubts_about_judge(half, min_kappa=0.51)
    assert doubt.startswith(
        "The judge disagrees with people: Cohen's kappa is 0.50 on 6 labeled pairs, below "
        "min_kappa=0.51. Choose another judge"
    )
    opposite = agree_with_people(RuleJudge(longer), rows("second", "first", "second", "first"))
    assert len(doubts_about_judge(opposite, min_kappa=0.2)) == 1
    assert doubts_about_judge(opposite, min_kappa=-1) == []


def test_labels_that_are_all_equal_are_named_as_the_cause():
    people = agree_with_people(RuleJudge(longer), rows("first", "first", "first"))
    (doubt,) = doubts_about_judge(people, min_kappa=0.2)
    assert "kappa is 0.00 on 3" in doubt and "exchange first and second in half" in doubt
    ties = agree_with_people(RuleJudge(longer), rows("tie", "tie", "tie"))
    (doubt,) = doubts_about_judge(ties, min_kappa=0.2)
    assert "All labels are ties, so kappa cannot be above 0: label pairs that differ" in doubt


def test_a_judge_that_always_agrees_is_not_doubted_without_a_kappa():
    same = agree_with_people(RuleJudge(lambda *_: "tie"), rows("tie", "tie"))
    assert same.kappa is None and doubts_about_judge(same, min_kappa=0.2) == []
    silent = agree_with_people(RuleJudge(lambda *_: "invalid"), rows("first", "tie"))
    (doubt,) = doubts_about_judge(silent, min_kappa=0.2)
    assert doubt == "The judge gave no verdict on the 2 pairs that people labeled."


def test_an_evaluation_by_a_judge_that_disagrees_with_people_is_inconclusive():
    def judged_by(**limits: Any) -> JudgedContests:
        texts = {"reference": ["a"] * 4, "ppo": ["bb"] * 4}
        return evaluate(
            RuleJudge(longer),
            Contestants(["w", "x", "y", "z"], texts),
            [("ppo", "reference")],
            rules={("ppo", "reference"): RULE},
            people=rows("second", "first", "second", "first"),
            config=EvaluationConfig(**limits),
            seed=0,
        ).result

    doubted = judged_by()
    assert not doubted.conclusive
    assert [text for text in doubted.reasons if "disagrees with people" in text]
    assert not [
        text for text in judged_by(min_kappa=-1, human_labels="a").reasons if "people" in text
    ]


def test_a_judge_without_a_verdict_has_no_agreement_with_people():
    result = agree_with_people(RuleJudge(lambda *_: "invalid"), rows("first"))
    assert (result.n, result.invalid, result.share, result.kappa) == (0, 1, None, None)


def votes(**words: str) -> list[Vote]:
    """The labels of each annotator for pairs 0, 1, ...: f, s or t."""
    labels = {"f": "first", "s": "second", "t": "tie"}
    return [
        Vote(prompt=str(number), first="x", second="y", label=labels[letter], annotator=name)
        for name, letters in words.items()
        for number, letter in enumerate(letters)
    ]


def alternative(judge: str, **words: str):
    """The alternative annotator test of a judge with these outcomes."""
    rows = votes(**words)
    labels = {"f": "first", "s": "second", "t": "tie", "i": "invalid"}
    return rows, compare_with_annotators(rows, [labels[judge[int(vote.prompt)]] for vote in rows])


def test_the_alternative_annotator_test_matches_the_sums_done_by_hand():
    # b and c always say first; a says second in 10 of 40 pairs, the judge in 4 others.
    # a: the judge is nearer to b and c in 10 pairs, a in 4. d has the mean -.15 and the variance
    # (14 - 40 * .15^2) / 39 = .3359, t = (-.15 - .15) / sqrt(.3359 / 40) = -3.274, p = .00112
    # b: where the judge says second, b is nearer; where a says second, both agree with c alone.
    # d has the mean .1 and the variance (4 - 40 * .1^2) / 39 = .0923, t = -1.041, p = .1522
    # Benjamini and Yekutieli, factor 3 (1 + 1/2 + 1/3) = 5.5: .00112 * 5.5, .1522 * 5.5 / 3
    rows, found = alternative(
        "f" * 26 + "ssss" + "f" * 10, a="f" * 30 + "s" * 10, b="f" * 40, c="f" * 40
    )
    a, b, c = found.people.values()
    assert (a.n, a.judge, a.person, a.replaceable) == (40, 0.9, 0.75, True)
    assert a.p == pytest.approx(0.00112 * 5.5, rel=0.01)
    assert (b.n, b.judge, b.person, b.replaceable) == (40, 0.9, 1.0, False)
    assert b.p == pytest.approx(0.1522 * 5.5 / 3, rel=0.01)
    assert (c, found.cost, found.passed) == (b, COST, False)
    assert found.winning_rate == pytest.approx(1 / 3)
    # Neither the order of the answers nor rows without annotator or verdict change anything.
    turned = [
        replace(vote, first="y", second="x", label={"first": "second"}.get(vote.label, "first"))
        if number % 2
        else vote
        for number, vote in enumerate(rows)
    ]
    says = "f" * 26 + "ssss" + "f" * 10
    outcomes = [
        "first" if (says[int(vote.prompt)] == "f") == (vote.first == "x") else "second"
        for vote in turned
    ]
    changes = {"annotator": None}, {"prompt": "new"}, {"label": "tie"}
    more = [replace(rows[0], **one) for one in changes]
    again = compare_with_annotators(turned + more, [*outcomes, "tie", "invalid", "first"])
    assert again == found


def test_a_judge_as_good_as_people_may_stand_for_one_and_a_tossed_coin_may_not():
    rng = np.random.default_rng(0)
    truth = rng.choice(list("fs"), 200)

    def person(right: float) -> str:
        wrong = np.where(truth == "f", "s", "f")
        return "".join(np.where(rng.random(200) < right, truth, wrong))

    people = {name: person(0.8) for name in "abcd"}
    assert alternative(person(0.8), **people)[1].passed
    assert alternative("".join(truth), **people)[1].winning_rate == 1
    assert alternative(person(0.5), **people)[1].winning_rate == 0


@pytest.mark.filterwarnings("error")
def test_people_who_all_say_the_same_and_too_few_people_are_no_fault():
    # Where nobody ever differs, the judge is as good as everybody: the deviation is 0.
    same = alternative("t" * 30, a="t" * 30, b="t" * 30, c="t" * 30)[1]
    assert (same.winning_rate, {one.p for one in same.people.values()}) == (1.0, {0.0})
    worst = alternative("s" * 30, a="t" * 30, b="t" * 30, c="t" * 30)[1]
    assert (worst.winning_rate, worst.passed) == (0.0, False)
    for judge, words in (
        ("t" * 30, {"a": "t" * 30, "b": "t" * 30}),
        ("t" * 30, {"a": "t" * 30, "b": "t" * 30, "c": "t" * 29}),
        ("t" * 29 + "i", dict.fromkeys("abc", "t" * 30)),
    ):
        few = alternative(judge, **words)[1]
        assert (few.people, few.winning_rate, few.passed) == ({}, None, None)
        assert "who each labeled at least 30 pairs that other people labeled, too" in few.why
    assert compare_with_annotators(rows("first"), ["first"]) is None
    assert agree_with_people(RuleJudge(longer), votes(a="f", b="f")).alternative.people == {}
