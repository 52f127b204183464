import math

import pytest

from pipeline.win_rate import measure_win_rate
from ppo_core.errors import DataError


def longer(prompts, pairs):
    return [
        "tie" if len(a) == len(b) else "first" if len(a) > len(b) else "second" for a, b in pairs
    ]


def measure(judge, candidates, opponents, *, max_invalid=0.5):
    prompts = ["p"] * len(candidates)
    return measure_win_rate(judge, "j", prompts, candidates, opponents, max_invalid=max_invalid)


def test_the_rate_and_its_interval_match_the_sum_done_by_hand():
    # 2 wins, 1 tie, 1 loss of 4: rate 2.5 / 4. Wilson with z = 1.96:
    # centre (p + z^2/2n) / (1 + z^2/n), half z/(1+z^2/n) * sqrt(p(1-p)/n + z^2/4n^2)
    result = measure(longer, ["aaa", "aa", "a", "a"], ["a", "a", "a", "aa"])
    p, n, z = 0.625, 4, 1.959964
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert result.rate == p
    assert (result.n, result.ties, result.invalid, result.judge) == (4, 1, 0, "j")
    assert result.low == pytest.approx(centre - half, abs=1e-6)
    assert result.high == pytest.approx(centre + half, abs=1e-6)


def test_the_other_side_wins_the_rest():
    one, other = ["aaa", "aa", "a", "a"], ["a", "a", "a", "aa"]
    assert measure(longer, one, other).rate + measure(longer, other, one).rate == 1


def test_a_judge_that_prefers_a_position_gives_ties_only():
    # Known defect 46: one order per pair let the position decide.
    result = measure(lambda prompts, pairs: ["first"] * len(pairs), ["a"] * 5, ["b"] * 5)
    assert (result.rate, result.ties) == (0.5, 5)


def test_a_win_in_one_order_and_a_tie_in_the_other_is_a_tie():
    answers = iter([["first"], ["tie"]])
    assert measure(lambda prompts, pairs: next(answers), ["a"], ["b"]).ties == 1


@pytest.mark.parametrize("straight", [True, False])
def test_a_failed_verdict_counts_for_nobody(straight: bool):
    # Known defects 44 and 45: a failure on a swapped pair became a verdict, or a loss.
    answers = [["invalid", "first"], ["second", "second"]]
    calls = iter(answers if straight else [["first", "first"], ["invalid", "second"]])
    result = measure(lambda prompts, pairs: next(calls), ["a", "b"], ["c", "d"])
    assert (result.n, result.invalid, result.rate) == (1, 1, 1.0)


def test_too_many_failures_are_refused():
    def mute(prompts, pairs):
        return ["invalid", *(["first"] * (len(pairs) - 1))]

    with pytest.raises(DataError, match=r"no verdict for 1 of 4 pairs; up to .*max_invalid=20%"):
        measure(mute, ["a"] * 4, ["b"] * 4, max_invalid=0.2)
    with pytest.raises(DataError, match=r"no verdict for 2 of 2"):
        measure(lambda p, pairs: ["invalid"] * len(pairs), ["a"] * 2, ["b"] * 2, max_invalid=0.99)
