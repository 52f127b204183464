"""Accuracies on pairs of the same prompts, and comparisons of two models on the same pairs."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp
from statsmodels.stats.proportion import proportion_confint

from pipeline.evaluation.pair_accuracy import (
    difference_interval,
    groups_of,
    is_ahead,
    measure_rate,
)
from pipeline.inputs.labeled_pairs import LabeledPair


def test_the_interval_of_pairs_of_three_prompts_by_hand():
    # Sums of x - p by prompt: 1, 0 and -1, so V = (1 + 1) / 6^2 * 3 / 2 = 1 / 12. With p (1 - p) =
    # 1 / 4 and t[5] = 2.5706, t[2] = 4.3027: n = 1/4 * 12 * (2.5706 / 4.3027)^2 = 1.0708.
    rate = measure_rate(np.array([1.0, 1, 1, 0, 0, 0]), np.array([0, 0, 1, 1, 2, 2]))
    low, high = proportion_confint(1.0708 / 2, 1.0708, method="wilson")
    assert (rate.accuracy, rate.n) == (0.5, 6)
    assert (rate.low, rate.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("hit", [0.0, 1.0])
def test_pairs_that_are_all_right_or_all_wrong_count_once_for_each_prompt(hit: float):
    rate = measure_rate(np.full(12, hit), np.repeat(np.arange(4), 3))
    low, high = proportion_confint(4 * hit, 4, method="wilson")
    assert (rate.low, rate.high, rate.n) == (low, high, 12)


def test_pairs_without_a_prompt_or_with_one_prompt_for_all_are_independent():
    right = np.array([1.0, 0.5, 0, 1, 1])
    expected = proportion_confint(3.5, 5, method="wilson")
    for prompts in ([""] * 5, ["w1"] * 5, ["", "w1", "w2", "", "w3"]):
        pairs = [LabeledPair(prompt=prompt, chosen="a", rejected="b") for prompt in prompts]
        rate = measure_rate(right, groups_of(pairs))
        assert (rate.low, rate.high) == expected


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 5)), min_size=1))
def test_pairs_of_one_prompt_never_make_an_interval_narrower(rows: list[tuple[float, int]]):
    right, groups = (np.array(column) for column in zip(*rows, strict=True))
    alone = proportion_confint(right.sum(), right.size, method="wilson")
    rate = measure_rate(right, groups)
    assert rate.low <= alone[0] + 1e-12 and rate.high >= alone[1] - 1e-12
    assert 0 <= rate.low <= rate.accuracy + 1e-12 and rate.accuracy - 1e-12 <= rate.high <= 1
    order = np.random.default_rng(0).permutation(right.size)
    assert vars(measure_rate(right[order], groups[order])) == pytest.approx(vars(rate))


@pytest.mark.parametrize("prompts", [10, 100])
def test_random_scores_of_ranked_lists_are_rarely_shown_to_be_better_than_chance(prompts: int):
    # Of 16 answers to each prompt, all 120 pairs. With a tossed coin, 2.5 % would be expected; with
    # independent pairs, it would be 16 %.
    rng = np.random.default_rng(0)
    first, second = np.array([*combinations(range(16), 2)]).T
    groups = np.repeat(np.arange(prompts), first.size)
    above = 0
    for _ in range(1000):
        scores = rng.normal(size=(prompts, 16))
        right = (scores[:, first] > scores[:, second]).astype(float).ravel()
        above += measure_rate(right, groups).low > 0.5
    # The standard error of the share is 0.5 points.
    assert above / 1000 == pytest.approx(0.025, abs=0.012)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        # 4 pairs are right only by `one`, and 1 only by the other: 4 - 1 > sqrt(4 + 1).
        ("111111110000", "111100001000", True),
        # 2 against 1: 2 - 1 < sqrt(2 + 1).
        ("111110000000", "111001000000", False),
        # 1 against 0 and 2 against 0.
        ("1110", "1100", False),
        ("1", "0", False),
        ("1110", "1000", True),
        ("1110", "1110", False),
        ("0000", "1111", False),
        ("1111", "0000", True),
    ],
)
def test_a_model_is_ahead_by_more_than_one_standard_error(one: str, other: str, expected: bool):
    hits = (np.array([*row], dtype=float) for row in (one, other))
    assert is_ahead(*hits, np.arange(len(one))) is expected


def test_of_equal_models_each_is_rarely_ahead():
    # One standard error of a normal distribution: 16 % lie above it.
    rng = np.random.default_rng(0)
    groups = np.arange(200)
    ahead = [is_ahead(*(rng.random((2, 200)) < 0.6).astype(float), groups) for _ in range(2000)]
    assert np.mean(ahead) == pytest.approx(0.159, abs=0.03)


def test_pairs_of_one_prompt_are_added_up_before_models_are_compared():
    # Pair by pair, 4 - 1 > sqrt(5). By prompt, the differences are 3, 1 and -1: 3 < sqrt(11).
    one, other = np.array([1.0, 1, 1, 1, 0]), np.array([0.0, 0, 0, 0, 1])
    assert is_ahead(one, other, np.arange(5))
    assert not is_ahead(one, other, np.array([0, 0, 0, 1, 2]))
    # If all pairs have the same prompt, the models are compared on this prompt.
    assert is_ahead(one, other, np.zeros(5, dtype=int))


def test_an_interval_of_differences_by_hand():
    # Mean 0.5. Sums of x - 0.5 by prompt: 1, 0 and -1, so V = (1 + 1) / 6^2 * 3 / 2 = 1 / 12, and
    # t[2] = 4.3027.
    differences = np.array([1.0, 1, 1, 0, 0, 0])
    reach = 4.3027 / 12**0.5
    ends = difference_interval(differences, np.array([0, 0, 1, 1, 2, 2]))
    assert ends == pytest.approx((0.5 - reach, 0.5 + reach), abs=1e-4)


@pytest.mark.parametrize("groups", [np.arange(6), np.zeros(6, dtype=int)])
def test_differences_of_independent_pairs_have_the_interval_of_a_paired_t_test(groups):
    differences = np.array([1.0, 0.5, 0, -1, 0, 1])
    expected = ttest_1samp(differences, 0).confidence_interval()
    assert difference_interval(differences, groups) == pytest.approx(tuple(expected))


@pytest.mark.parametrize("prompts", [20, 100])
def test_of_equal_models_neither_is_better_by_copies_of_the_same_pairs(prompts: int):
    # Each difference stands 8 times. By independent pairs, 49 % of the intervals would not hold 0.
    rng = np.random.default_rng(0)
    groups, outside = np.repeat(np.arange(prompts), 8), 0
    for _ in range(1000):
        one, other = (rng.random((2, prompts)) < 0.6).astype(float)
        low, high = difference_interval(np.repeat(one - other, 8), groups)
        outside += not low <= 0 <= high
    # The standard error of the share is 0.7 points.
    assert outside / 1000 == pytest.approx(0.05, abs=0.018)
