"""Pairs are judged until the win rate is decided: the rule by hand, and what it asks a judge."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pipeline.evaluation.compare_in_both_orders import Comparison
from pipeline.evaluation.confidence_interval import BETS, Values
from pipeline.evaluation.sequential.sequential_test import (
    PAIRS_AT_ONCE,
    StoppingRule,
    compare_until_decided,
    promoted_share,
)
from pipeline.evaluation.win_rate import doubts_of, values_of_prompts
from pipeline.judges.verdict import Verdict
from pipeline.settings.gate_configs import PromotionConfig

RULE = StoppingRule(least=0.5, gain=0.55, alpha=0.001)


class Recorder:
    """A judge that decides by a function of the two texts, and counts its questions."""

    name = "recorder"
    version = "1"
    members: tuple[str, ...] = ()

    def __init__(self, decide: Callable[[str, str], str]) -> None:
        self._decide = decide
        self.asked: Counter[tuple[str, str, str]] = Counter()

    def __call__(self, prompts: Sequence, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        self.asked.update((str(p), *pair) for p, pair in zip(prompts, pairs, strict=True))
        return [Verdict(winner=self._decide(*pair)) for pair in pairs]


def longer(first: str, second: str) -> str:
    if len(first) == len(second):
        return "tie"
    return "first" if len(first) > len(second) else "second"


def judged(
    points: Sequence[float], prompts: Sequence[str] | None = None, rule: StoppingRule = RULE
):
    """Compare candidates that win, tie or lose as `points` say."""
    prompts = prompts or [f"prompt {n}" for n in range(len(points))]
    texts = {1.0: "longer", 0.5: "same", 0.0: "s"}
    judge = Recorder(longer)
    candidates = [texts[point] for point in points]
    return judge, compare_until_decided(
        judge, prompts, candidates, ["same"] * len(points), rule, seed=1
    )


def test_a_win_rate_is_decided_when_the_capital_reaches_one_over_alpha():
    # Against 1/2, each win multiplies the capital of a bet by 1 + bet.
    wins = next(n for n in range(1, 99) if np.mean((1 + BETS) ** n) >= 1000)
    assert RULE.least_prompts() == wins == 15
    assert RULE.decide(Values(np.ones(wins - 1))) == "undecided"
    assert RULE.decide(Values(np.ones(wins))) == "better"


def test_the_capital_of_wins_losses_and_ties_by_hand():
    values = np.array([1.0, 0.0, 0.5, 1.0])
    by_hand = np.mean([(1 + b) * (1 - b) * 1 * (1 + b) for b in BETS])
    test = RULE.test(Values(values), asked=4, available=9)
    assert test.evidence == pytest.approx(by_hand)
    assert (test.decided, test.asked, test.available) == ("undecided", 4, 9)
    # Against 0.8, a win gains bet / 4, and a loss still loses the bet.
    high = StoppingRule(least=0.8, gain=0.9, alpha=0.001).test(
        Values(values[:2]), asked=2, available=2
    )
    assert high.evidence == pytest.approx(np.mean([(1 + b / 4) * (1 - b) for b in BETS]))


def test_a_rate_below_what_is_worth_finding_is_given_up():
    # Mirrored and against 0.55, a loss gains bet x 0.55 / 0.45.
    losses = next(n for n in range(1, 99) if np.mean((1 + BETS * 0.55 / 0.45) ** n) >= 20)
    assert RULE.decide(Values(np.zeros(losses - 1))) == "undecided"
    assert RULE.decide(Values(np.zeros(losses))) == "not better"


@pytest.mark.parametrize(
    ("points", "decided"), [([1.0] * 200, "better"), ([0.0] * 200, "not better")]
)
def test_a_clear_contest_asks_one_batch_in_both_orders(points: list[float], decided: str):
    judge, found = judged(points)
    assert found.test.decided == decided
    assert found.test.asked == len(found.positions) == PAIRS_AT_ONCE
    assert found.test.available == 200
    assert sum(judge.asked.values()) == 2 * PAIRS_AT_ONCE
    assert max(judge.asked.values()) == 1


def test_an_even_contest_asks_for_all_pairs_and_keeps_their_order():
    found = judged([1.0, 0.0] * 40)[1]
    assert found.test.decided == "undecided"
    assert found.positions == list(range(80))
    assert list(found.comparison.prompts) == [f"prompt {n}" for n in range(80)]
    assert found.comparison.outcomes == ("first", "second") * 40


def test_a_batch_is_drawn_at_random_and_by_the_seed():
    found = judged([1.0] * 200)[1]
    assert found.positions == sorted(found.positions)
    assert found.positions != list(range(PAIRS_AT_ONCE))
    assert found.positions == judged([1.0] * 200)[1].positions
    assert list(found.comparison.prompts) == [f"prompt {n}" for n in found.positions]


def test_pairs_of_one_prompt_are_judged_together_and_count_once():
    prompts = [f"prompt {n // 4}" for n in range(400)]
    found = judged([1.0] * 400, prompts)[1]
    counts = Counter(found.comparison.prompts)
    assert set(counts.values()) == {4}
    # 15 prompts decide, and a batch of 32 pairs has 8.
    assert len(counts) == 16
    assert len(values_of_prompts(found.comparison)) == 16


def test_pairs_without_a_verdict_decide_nothing():
    judge = Recorder(lambda first, second: "invalid")
    prompts = [f"prompt {n}" for n in range(70)]
    found = compare_until_decided(judge, prompts, ["a"] * 70, ["b"] * 70, RULE, seed=1)
    assert found.test.asked == 70
    assert found.test.evidence < 1.0
    inconclusive = compare_until_decided(
        judge, prompts, ["a"] * 70, ["b"] * 70, RULE, is_conclusive=lambda comparison: False, seed=1
    )
    assert inconclusive.test.evidence == 1.0
    assert found.test.decided == "undecided"


@pytest.mark.parametrize(("least", "gain"), [(0.0, 0.05), (0.99, 0.995)])
def test_a_limit_at_the_edge_of_the_range_can_be_decided(least: float, gain: float):
    rule = StoppingRule(least=least, gain=gain, alpha=0.001)
    assert rule.decide(Values(np.full(2000, 1.0))) == "better"
    assert rule.decide(Values(np.zeros(400))) == "not better"
    assert np.isfinite(rule.test(Values(np.ones(5000)), asked=5000, available=5000).evidence)


def test_a_rate_just_above_a_high_limit_survives_a_tie():
    limits = PromotionConfig(min_win_rate=0.95)
    rule = StoppingRule(least=0.95, gain=limits.gain_above(0.95), alpha=0.001)
    assert rule.gain == pytest.approx(0.975)
    assert rule.decide(Values(np.array([1.0] * 20 + [0.5]))) == "undecided"


@pytest.mark.parametrize(("least", "wins"), [(0.5, 15), (0.8, 47), (0.9999, None)])
def test_the_fewest_wins_are_those_with_which_the_rule_decides(least: float, wins: int | None):
    rule = StoppingRule(least=least, gain=None, alpha=0.001)
    found = rule.least_prompts()
    assert wins is None or found == wins
    assert rule.decide(Values(np.ones(found))) == "better"
    assert rule.decide(Values(np.ones(found - 1))) == "undecided"


@pytest.mark.parametrize("prompts", [14, 15, 64, 512])
@pytest.mark.parametrize("least", [0.5, 0.8])
def test_the_wins_that_are_needed_are_the_fewest_with_which_the_rule_decides(prompts, least):
    rule = StoppingRule(least=least, gain=None, alpha=0.001)

    def decision(wins: int) -> str:
        return rule.decide(Values(np.array([1.0] * wins + [0.0] * (prompts - wins))))

    fewest = [wins for wins in range(prompts + 1) if decision(wins) == "better"]
    assert rule.least_wins(prompts) == (fewest[0] if fewest else prompts + 1)


def test_the_judge_is_asked_further_until_its_verdicts_are_conclusive():
    failed = iter([True, True])

    def tired(first: str, second: str) -> str:
        return "invalid" if next(failed, False) else longer(first, second)

    def is_conclusive(comparison: Comparison) -> bool:
        return not doubts_of(comparison, max_invalid=0.05, max_flip_rate=0.5)

    prompts = [f"prompt {n}" for n in range(400)]
    found = compare_until_decided(
        Recorder(tired),
        prompts,
        ["longer"] * 400,
        ["same"] * 400,
        RULE,
        is_conclusive=is_conclusive,
        seed=1,
    )
    # Two of 32 are above 5 %, two of 64 are not.
    assert found.comparison.outcomes.count("invalid") == 2
    assert found.test.asked == 64
    assert found.test.decided == "better"


def test_the_judge_is_asked_no_further_about_a_candidate_that_has_lost():
    prompts = [f"prompt {n}" for n in range(400)]
    answers = ["same"] * 400, ["longer"] * 400
    found = compare_until_decided(
        Recorder(longer), prompts, *answers, RULE, is_conclusive=lambda comparison: False, seed=1
    )
    assert found.test.decided == "not better"
    assert found.test.asked == 32


def test_a_missing_verdict_counts_as_a_loss_in_the_evidence():
    wins = np.ones(RULE.least_prompts())
    worst = Values(np.append(wins, np.zeros(3)))
    assert RULE.decide(Values(wins)) == "better"
    assert RULE.decide(Values(wins), worst) == "undecided"
    test = RULE.test(Values(wins), asked=18, available=18, worst=worst)
    by_hand = np.mean([(1 + b) ** wins.size * (1 - b) ** 3 for b in BETS])
    assert (test.decided, test.evidence) == ("undecided", pytest.approx(by_hand))
    # Missing verdicts alone do not show that a candidate is worse.
    assert RULE.decide(Values(np.zeros(0)), Values(np.zeros(400))) == "undecided"


def test_a_candidate_whose_bad_answers_get_no_verdict_is_not_better():
    def refusing(first: str, second: str) -> str:
        return "invalid" if "?" in (first, second) else longer(first, second)

    # It wins 200 of 400 pairs, but half of the others have no verdict.
    candidates = ["longer"] * 200 + ["s"] * 100 + ["?"] * 100
    prompts, same = [f"prompt {n}" for n in range(400)], ["same"] * 400
    found = compare_until_decided(Recorder(refusing), prompts, candidates, same, RULE, seed=1)
    valid = Values(values_of_prompts(found.comparison))
    assert RULE.decide(valid) == "better"
    assert (found.test.decided, found.test.asked) == ("undecided", 400)


def test_without_a_rate_worth_finding_all_pairs_are_judged():
    rule = StoppingRule(least=0.5, gain=None, alpha=0.001)
    _, found = judged([0.0] * 100, rule=rule)
    assert (found.test.asked, found.test.decided) == (100, "undecided")


def weeks(
    rate: float, ties: float, *, runs: int, most: int = 1024, seed: int = 0
) -> tuple[float, float]:
    """How often the rule says "better", and after how many pairs on average it stops."""
    rng = np.random.default_rng(seed)
    better, asked = 0, 0
    for _ in range(runs):
        draws = rng.uniform(size=most)
        values = np.where(draws < ties, 0.5, (rng.uniform(size=most) < rate).astype(float))
        for stop in range(PAIRS_AT_ONCE, most + 1, PAIRS_AT_ONCE):
            decided = RULE.decide(Values(values[:stop]))
            if decided != "undecided":
                break
        better += decided == "better"
        asked += stop
    return better / runs, asked / runs


@pytest.mark.slow
def test_power_and_false_promotions_of_simulated_weeks():
    # The rate is that among pairs without a tie; the mean is 0.5 + 0.8 (rate - 0.5).
    assert weeks(0.5, 0.2, runs=400)[0] <= 2 / 400
    power, asked = weeks(0.625, 0.2, runs=100)
    assert power >= 0.95
    assert asked < 500
    power, asked = weeks(0.875, 0.2, runs=100)
    assert power == 1.0
    assert asked < 64


def test_the_first_decision_is_made_at_a_look_and_not_between():
    rule = StoppingRule(least=0.5, gain=None, alpha=0.001)
    wins = np.ones(100)
    assert rule.least_prompts() == 15
    assert rule.first_decision(wins) == ("better", PAIRS_AT_ONCE)
    assert rule.first_decision(wins[:15]) == ("better", 15)
    assert rule.first_decision(wins[:14]) == ("undecided", 14)


def test_a_later_turn_does_not_change_the_first_decision():
    rule = StoppingRule(least=0.5, gain=0.55, alpha=0.001)
    values = np.r_[np.ones(64), np.zeros(300)]
    assert rule.first_decision(values) == ("better", 32)
    assert rule.decide(Values(values)) == "not better"
    assert rule.first_decision(1 - values)[0] == "not better"


def test_the_share_keeps_to_alpha_also_where_one_side_won_all_pairs():
    rule = StoppingRule(least=0.5, gain=None, alpha=0.05)
    share = promoted_share(np.ones(200), rule, weeks=2000, seed=1)
    assert 0.001 < share < 0.05
    assert promoted_share(np.ones(200), rule, weeks=2000, seed=1) == share


def test_pairs_that_are_all_ties_promote_nothing():
    rule = StoppingRule(least=0.5, gain=None, alpha=0.05)
    assert promoted_share(np.full(200, 0.5), rule, weeks=50, seed=1) == 0


def test_a_gate_that_asks_for_less_than_half_promotes_equal_policies():
    rule = StoppingRule(least=0.3, gain=None, alpha=0.05)
    assert promoted_share(np.ones(200), rule, weeks=200, seed=1) > 0.99
