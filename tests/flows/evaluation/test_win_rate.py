import numpy as np
import pytest

from pipeline.evaluation.compare_in_both_orders import Comparison, compare
from pipeline.evaluation.confidence_interval import mean_interval
from pipeline.evaluation.win_rate import compare_policies, describe, measure_win_rate
from ppo_core.errors import DataError
from tests.flows.evaluation.test_compare_in_both_orders import RuleJudge, judged, longer


def measure(comparison: Comparison, *, max_invalid=0.5, max_flip_rate=1.0):
    return measure_win_rate(comparison, max_invalid=max_invalid, max_flip_rate=max_flip_rate)


def simulate(rng, count: int, *, win: float, tie: float = 0.0) -> Comparison:
    """Pairs judged by a judge that wants the candidate with probability `win` in each order."""
    straight, back = rng.choice(
        ["first", "tie", "second"], size=(2, count), p=[win, tie, 1 - win - tie]
    ).tolist()
    return judged(straight, back)


def test_the_rate_counts_a_tie_as_half_and_leaves_invalid_pairs_out():
    # 2 wins, 1 tie, 1 loss of 4 valid: (2 + 1/2) / 4
    comparison = judged(
        ["first", "first", "second", "first", "invalid"],
        ["first", "first", "second", "second", "first"],
    )
    result = measure(comparison)
    assert result.rate == 0.625
    assert (result.wins, result.losses, result.ties, result.invalid) == (2, 1, 1, 1)
    assert (result.n, result.flip_rate, result.judge) == (4, 0.25, "j")
    assert result.low < result.rate < result.high


def test_the_interval_is_the_confidence_sequence_of_the_points():
    # 600 won of 1,000: an interval for one look has 1.96 * sqrt(0.6 * 0.4 / 1000) = 0.030.
    result = measure(judged(["first"] * 600 + ["second"] * 400))
    values = np.array([1.0] * 600 + [0.0] * 400)
    assert (result.low, result.high) == mean_interval(values, lowest=0.0, highest=1.0)
    assert 0.030 < 0.6 - result.low < 0.055
    assert 0.030 < result.high - 0.6 < 0.055


def test_the_other_side_wins_the_rest():
    answers = ["aaa", "aa", "a", "a"], ["a", "a", "a", "aa"]
    prompts = list("pqrs")
    one = measure(compare(RuleJudge(longer), prompts, *answers))
    other = measure(compare(RuleJudge(longer), prompts, *answers[::-1]))
    assert one.rate == 0.625
    assert other.rate == 1 - one.rate
    assert (other.wins, other.losses, other.ties) == (one.losses, one.wins, one.ties)
    assert other.low == pytest.approx(1 - one.high, abs=0.01)
    assert other.high == pytest.approx(1 - one.low, abs=0.01)


def test_a_judge_that_prefers_a_position_gives_ties_only():
    # Known defect 46: one order per pair let the position decide.
    first = RuleJudge(lambda prompt, one, other: "first")
    prompts = [str(number) for number in range(1000)]
    comparison = compare(first, prompts, ["a"] * 1000, ["b"] * 1000)
    result = measure(comparison, max_flip_rate=0.5)
    assert (result.rate, result.ties, result.flip_rate) == (0.5, 1000, 1.0)
    assert not result.conclusive
    assert result.reasons == [
        "the verdict followed the position in 1000 of 1000 valid pairs (100.0%), above "
        "max_flip_rate=0.5"
    ]


@pytest.mark.parametrize("straight", [True, False])
def test_a_failed_verdict_counts_for_nobody(straight: bool):
    # Known defects 44 and 45: a failure on a swapped pair became a verdict, or a loss.
    verdicts = ["invalid", "first"], ["first", "first"]
    result = measure(judged(*(verdicts if straight else verdicts[::-1])))
    assert (result.n, result.invalid, result.rate, result.losses) == (1, 1, 1.0, 0)


def test_a_judge_that_fails_for_three_pairs_in_ten_is_inconclusive():
    def tired(prompt, first, second):
        return "invalid" if int(prompt) % 10 < 3 else longer(prompt, first, second)

    prompts = [str(number) for number in range(1000)]
    comparison = compare(RuleJudge(tired), prompts, ["aa"] * 1000, ["b"] * 1000)
    result = measure(comparison, max_invalid=0.1)
    assert (result.rate, result.n, result.losses, result.invalid) == (1.0, 700, 0, 300)
    assert not result.conclusive
    assert result.reasons == ["no verdict for 300 of 1000 pairs (30.0%), above max_invalid=0.1"]


def test_the_limits_themselves_are_allowed():
    # 29 of 100: 0.29 * 100 is 28.999999999999996, which a product would put below 29.
    straight = ["invalid"] * 29 + ["first"] * 71
    assert measure(judged(straight), max_invalid=0.29).conclusive
    assert not measure(judged(straight), max_invalid=0.28).conclusive
    straight, back = ["first"] * 100, ["second"] * 29 + ["first"] * 71
    assert measure(judged(straight, back), max_flip_rate=0.29).conclusive
    assert not measure(judged(straight, back), max_flip_rate=0.28).conclusive


def test_both_doubts_are_named():
    result = measure(
        judged(["invalid", "first"], ["first", "second"]), max_invalid=0, max_flip_rate=0
    )
    assert len(result.reasons) == 2


def test_no_verdict_at_all_is_refused():
    with pytest.raises(DataError, match=r"no verdict for 2 of 2 pairs"):
        measure(judged(["invalid"] * 2), max_invalid=1.0)


@pytest.mark.parametrize(("outcome", "share"), [("first", 1.0), ("second", 0.0), ("tie", 0.5)])
def test_where_all_outcomes_are_the_same_the_interval_is_not_empty(outcome: str, share: float):
    result = measure(judged([outcome] * 20))
    assert result.rate == share
    assert result.low <= share <= result.high
    assert 0.1 < result.high - result.low < 0.6


def test_answers_to_one_prompt_count_once():
    outcomes = np.random.default_rng(0).choice(["first", "second"], 250).tolist()
    alone = measure(judged(outcomes))
    # Four times as many pairs that show nothing new.
    together = measure(judged(outcomes * 4, prompts=[str(i) for i in range(250)] * 4))
    assert (together.rate, together.low, together.high) == (alone.rate, alone.low, alone.high)
    assert (together.n, alone.n) == (1000, 250)
    apart = measure(judged(outcomes * 4))
    assert apart.high - apart.low < 0.6 * (alone.high - alone.low)


def test_a_prompt_with_many_answers_has_no_more_weight_than_another():
    # Of p three wins, of q a loss and a win: (1 + 1/2) / 2.
    result = measure(judged(["first"] * 3 + ["second", "first"], prompts=list("pppqq")))
    assert result.rate == 0.75
    assert (result.n, result.wins) == (5, 4)


def test_the_interval_of_identical_policies_holds_one_half():
    hits = 0
    for seed in range(200):
        result = measure(simulate(np.random.default_rng(seed), 200, win=0.4, tie=0.2))
        hits += result.low <= 0.5 <= result.high
    assert hits >= 0.95 * 200


def test_a_policy_that_wins_60_of_100_is_found_better():
    hits = 0
    for seed in range(100):
        wins = np.random.default_rng(seed).choice(["first", "second"], 1000, p=[0.6, 0.4])
        hits += measure(judged(wins.tolist())).low > 0.5
    assert hits >= 99


def test_the_figure_names_its_judge_and_says_if_it_decides_nothing():
    comparison = judged(["first"] * 647 + ["second"] * 353)
    assert describe(measure(comparison)) == "64.70% (95% CI 59.6-69.6, n=1000, judge j)"
    mute = judged(["first"] * 647 + ["second"] * 353 + ["invalid"])
    assert describe(measure(mute, max_invalid=0)) == (
        "64.70% (95% CI 59.6-69.6, n=1000, judge j, inconclusive)"
    )


def test_two_policies_are_compared_on_the_pairs_valid_for_both():
    # Valid for both: the first four. Rates (1 + 1 + 1/2 + 0) / 4 and (0 + 1 + 0 + 1/2) / 4.
    one = judged(["first", "first", "tie", "second", "invalid", "first"])
    other = judged(["second", "first", "second", "tie", "first", "invalid"])
    result = compare_policies(one, other)
    assert (result.difference, result.n, result.judge) == (0.25, 4, "j")
    assert result.low < 0.25 < result.high
    back = compare_policies(other, one)
    assert (back.difference, back.low, back.high) == pytest.approx(
        (-0.25, -result.high, -result.low), abs=1e-5
    )


def test_a_policy_is_no_better_than_itself():
    comparison = simulate(np.random.default_rng(0), 100, win=0.6)
    result = compare_policies(comparison, comparison)
    assert result.difference == 0.0
    assert result.low < 0 < result.high


def test_differences_of_one_prompt_count_once():
    # Of p two differences of 1, of q one of 0, and of -1.
    one, other = (
        judged(["first"] * 3, prompts=list("ppq")),
        judged(["second"] * 2 + ["first"], prompts=list("ppq")),
    )
    swapped = judged(["first"] * 2 + ["second"], prompts=list("ppq"))
    assert compare_policies(one, other).difference == 0.5
    assert compare_policies(swapped, other).difference == 0.0


def test_the_paired_interval_is_narrower_where_prompts_decide():
    # Both win on the easy prompts; one of them on 60 hard ones of 400 too.
    rng = np.random.default_rng(0)
    easy = rng.choice(["first", "second"], 340).tolist()
    one, other = judged(easy + ["first"] * 60), judged(easy + ["second"] * 60)
    paired = compare_policies(one, other)
    assert paired.difference == pytest.approx(0.15)
    assert 0 < paired.low < 0.15 < paired.high < 0.35
    apart = [measure(comparison) for comparison in (one, other)]
    assert paired.high - paired.low < sum(result.high - result.low for result in apart) / 2


def test_the_interval_of_equal_policies_holds_zero():
    hits = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        one, other = (simulate(rng, 200, win=0.6) for _ in range(2))
        result = compare_policies(one, other)
        hits += result.low <= 0 <= result.high
    assert hits >= 95


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (judged(["first"], prompts=["q"]), "differ in prompts"),
        (judged(["first"], opponents=["another"]), "differ in opponents"),
        (judged(["invalid"]), "no verdict for 1 of 1 pairs"),
    ],
)
def test_what_cannot_be_compared_is_refused(other: Comparison, message: str):
    with pytest.raises(DataError, match=message):
        compare_policies(judged(["first"]), other)


def test_policies_without_a_pair_valid_for_both_are_refused():
    with pytest.raises(DataError, match="no verdict for both policies on any of 2 prompts"):
        compare_policies(judged(["first", "invalid"]), judged(["invalid", "first"]))
