"""People's labels of some pairs correct a biased judge: by hand, and in simulation."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pipeline.evaluation.compare_in_both_orders import Comparison
from pipeline.evaluation.confidence_interval import Values
from pipeline.evaluation.sequential.people_and_judge import (
    LEAST_LABELS,
    Labels,
    corrected_values,
    people_and_judge,
    ppi_variance,
    ppi_weight,
)
from pipeline.evaluation.sequential.sequential_test import (
    StoppingRule,
    compare_until_decided,
)
from pipeline.inputs.human_labels_to_pairs import Vote
from pipeline.judges.verdict import Verdict

NAN = np.nan


def test_corrected_values_by_hand():
    judged = np.array([1.0, 1.0, 0.0, 1.0])
    people = np.array([1.0, NAN, 1.0, NAN])
    found = corrected_values(judged, people, 0.5)
    # Before the first label L is 0, so the guess is 1/2. After it L = (1/2 * 1/2) / (1/4 + 1/4).
    # After the third pair, the products are 1/4 - 1/4 = 0.
    first = 0.5 + (1 - 0.5) / 0.5
    third = 0.25 + (1 - 0.25) / 0.5
    assert found.values == pytest.approx([first, 0.75, third, 0.5])
    assert (found.lowest, found.highest) == (-1.0, 2.0)


def test_the_rate_by_hand():
    judged = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    people = np.array([1.0, 0.0, 0.0, 0.0, NAN, NAN, NAN, NAN])
    found = people_and_judge(judged, people, Values(np.array([0.5])))
    # Cov(y, f) = 1/8 and Var(f) = 1/4 over the four labels; there are as many other prompts.
    assert found.weight == pytest.approx(0.5 / 2)
    assert found.rate == pytest.approx(0.25 + (1.0 - 0.5) / 4)
    # y - f / 4 is 3/4, -1/4, 0 and 0; the judge says the same of all other prompts.
    variance = (10 / 64 - 1 / 64) / 4
    assert found.worth == pytest.approx((3 / 16) / variance)
    assert found.labels == 4


def test_a_judge_that_says_always_the_same_has_no_weight():
    assert ppi_weight(np.ones(40), np.linspace(0, 1, 40), 100) == 0


def test_a_judge_that_says_the_opposite_of_people_has_no_weight():
    f = np.tile([0.0, 1.0], 20)
    assert ppi_weight(f, 1 - f, 100) == 0


def draw(
    rng: np.random.Generator, rate: float, *, bias: float, labels: int, pairs: int = 1024
) -> tuple[np.ndarray, np.ndarray]:
    """A judge's points of pairs that people win at a rate, and people's labels of some of them.

    The judge agrees with people in three of four pairs, and then turns some defeats into wins.
    """
    people = (rng.uniform(size=pairs) < rate).astype(float)
    judged = np.where(rng.uniform(size=pairs) < 0.75, people, 1 - people)
    judged = np.where(rng.uniform(size=pairs) < bias / (judged == 0).mean(), 1.0, judged)
    labeled = rng.permutation(pairs) < labels
    return judged, np.where(labeled, people, NAN)


def test_a_biased_judge_promotes_no_equal_policy_and_is_found_where_people_are_not_asked():
    rng = np.random.default_rng(0)
    rule = StoppingRule(least=0.5, gain=None, alpha=0.001)
    corrected = alone = 0
    for _ in range(1000):
        judged, people = draw(rng, 0.5, bias=0.1, labels=100)
        values = corrected_values(judged, people, 100 / 1024)
        corrected += rule.decide(values) == "better"
        alone += rule.decide(Values(judged)) == "better"
    assert corrected <= 1
    assert alone > 800


def test_the_variance_is_that_of_the_formula_and_the_mean_that_of_people():
    rng = np.random.default_rng(1)
    rates, variances = [], []
    for _ in range(4000):
        judged, people = draw(rng, 0.6, bias=0.1, labels=100)
        labeled = ~np.isnan(people)
        f, y = judged[labeled], people[labeled]
        others = judged[~labeled]
        weight = ppi_weight(f, y, len(others))
        rates.append(y.mean() + weight * (others.mean() - f.mean()))
        variances.append(ppi_variance(f, y, others, weight))
    assert np.mean(rates) == pytest.approx(0.6, abs=0.003)
    assert np.var(rates) == pytest.approx(np.mean(variances), rel=0.1)


class Biased:
    """A judge that always prefers the candidate, whose answers begin with `good`."""

    name = "biased"
    version = "1"
    members: tuple[str, ...] = ()

    def __init__(self) -> None:
        """Ask about nothing yet."""
        self.asked: list[str] = []

    def __call__(self, prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        self.asked += [prompt for prompt in prompts if prompt not in self.asked]
        return [
            Verdict("first" if first.startswith("good") else "second") for first, second in pairs
        ]


def contest(count: int) -> tuple[list[str], list[str], list[str]]:
    numbers = range(count)
    return (
        [f"p{n}" for n in numbers],
        [f"good {n}" for n in numbers],
        [f"bad {n}" for n in numbers],
    )


def row(number: int, label: str, *, turned: bool = False) -> Vote:
    first, second = f"good {number}", f"bad {number}"
    if turned:
        first, second = second, first
        label = {"first": "second", "second": "first"}.get(label, label)
    return Vote(prompt=f"p{number}", first=first, second=second, label=label)


def test_labels_of_both_orders_and_several_people_belong_to_the_pair():
    rows = [row(n, "first", turned=n % 2 == 0) for n in range(LEAST_LABELS)]
    rows += [row(0, "second"), row(1, "tie"), replace(row(2, "first"), second="another")]
    labels = Labels.of(rows, *contest(60))
    assert labels is not None
    assert labels.share == 0.5
    assert labels.points["p0", "good 0", "bad 0"] == 0.5
    assert labels.points["p1", "good 1", "bad 1"] == 0.75
    assert labels.points["p2", "good 2", "bad 2"] == 1.0


def test_fewer_labels_than_the_least_decide_nothing():
    rows = [row(n, "first") for n in range(LEAST_LABELS - 1)]
    assert Labels.of([*rows, replace(row(50, "first"), first="other")], *contest(60)) is None


@pytest.mark.parametrize(("wins", "decided"), [(30, "undecided"), (60, "better")])
def test_people_overrule_a_judge_that_always_prefers_the_candidate(wins: int, decided: str):
    rows = [row(n, "first" if n < wins else "second") for n in range(60)]
    pairs = contest(60)
    rule = StoppingRule(least=0.5, gain=None, alpha=0.001)
    alone = compare_until_decided(Biased(), *pairs, rule, seed=1)
    assert alone.test.decided == "better"
    assert alone.people is None
    found = compare_until_decided(Biased(), *pairs, rule, labels=Labels.of(rows, *pairs), seed=1)
    assert found.test.decided == decided
    assert found.people is not None
    assert found.people.weight == 0
    if decided == "undecided":
        assert found.people.labels == 60
        assert found.people.worth == pytest.approx(60)
        assert found.people.rate == 0.5
        assert found.people.low < 0.5 < found.people.high


def test_labels_of_the_pairs_that_an_earlier_run_asked_first_are_spread_over_the_order():
    """A label counts 1 / share times, so a beginning of labeled pairs alone would be no sample."""
    pairs = contest(600)
    rule = StoppingRule(least=0.5, gain=None, alpha=0.001)
    first = Biased()
    compare_until_decided(first, *pairs, rule, seed=1)
    labeled = first.asked[:60]
    rows = [row(int(prompt[1:]), "first") for prompt in labeled]
    repeated = Biased()
    compare_until_decided(repeated, *pairs, rule, labels=Labels.of(rows, *pairs), seed=1)
    assert sum(prompt in labeled for prompt in repeated.asked[:60]) < 20


def test_labels_of_pairs_without_a_verdict_give_no_rate():
    pairs = contest(60)
    labels = Labels.of([row(n, "first") for n in range(30)], *pairs)
    assert labels is not None
    prompts, candidates, opponents = map(tuple, pairs)
    verdicts = tuple(Verdict("invalid" if n < 30 else "first") for n in range(60))
    judged = Comparison(
        prompts=prompts,
        candidates=candidates,
        opponents=opponents,
        straight=verdicts,
        swapped=verdicts,
        judge="any",
    )
    assert labels.rate(judged) is None


def test_a_first_batch_without_a_verdict_ends_nothing():
    class Late(Biased):
        def __call__(
            self, prompts: Sequence[str], pairs: Sequence[tuple[str, str]]
        ) -> list[Verdict]:
            is_first = not self.asked
            given = super().__call__(prompts, pairs)
            return [Verdict("invalid")] * len(pairs) if is_first else given

    pairs = contest(600)
    rows = [row(n, "first") for n in range(60)]
    rule = StoppingRule(least=0.5, gain=None, alpha=0.001)
    found = compare_until_decided(Late(), *pairs, rule, labels=Labels.of(rows, *pairs), seed=1)
    assert found.test.decided == "better"


def test_values_follow_the_order_of_asking():
    """The weight of the judge depends on earlier prompts alone."""
    rows = [row(n, "first" if n % 3 else "second") for n in range(60)]
    prompts, candidates, opponents = contest(60)
    labels = Labels.of(rows, prompts, candidates, opponents)
    assert labels is not None
    verdicts = tuple(Verdict("first" if n % 2 else "second") for n in range(60))
    judged = Comparison(
        prompts=tuple(prompts),
        candidates=tuple(candidates),
        opponents=tuple(opponents),
        straight=verdicts,
        swapped=verdicts,
        judge="any",
    )
    whole = labels.values(judged).values
    begun = Comparison(
        **{
            name: getattr(judged, name)[:40]
            for name in ("prompts", "candidates", "opponents", "straight", "swapped")
        },
        judge="any",
    )
    assert labels.values(begun).values == pytest.approx(whole[:40])
