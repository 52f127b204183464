"""Betting on a mean: the capital by hand, and intervals that hold whenever one looks."""

import numpy as np
import pytest

from pipeline.evaluation.confidence_interval import BETS, log_capital, mean_interval
from tests.helpers.slow_cases import slow


def test_the_capital_is_the_mean_of_what_the_bets_have_won():
    # Against 1/2, a win of 1 gains the bet's fraction, and a loss of 0 loses it.
    by_hand = np.mean([(1 + bet) * (1 + bet) * (1 - bet) for bet in BETS])
    assert log_capital(np.array([1.0, 1.0, 0.0]), 0.5, 0.0) == pytest.approx(np.log(by_hand))


def test_values_at_the_bet_mean_win_nothing():
    assert log_capital(np.full(10, 0.3), 0.3, -1.0) == pytest.approx(0)


def test_a_side_that_nothing_speaks_for_stays_open():
    low, high = mean_interval(np.array([1.0, 1.0]), lowest=0.0, highest=1.0)
    assert 0 < low < 0.5
    assert high == 1.0


def test_the_interval_moves_with_the_values():
    values = np.random.default_rng(0).uniform(0, 1, 50)
    low, high = mean_interval(values, lowest=0.0, highest=1.0)
    mirrored = mean_interval(1 - values, lowest=0.0, highest=1.0)
    scaled = mean_interval(10 * values - 3, lowest=-3.0, highest=7.0)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-5)
    assert scaled == pytest.approx((10 * low - 3, 10 * high - 3), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.5, *slow(0.1, 0.9)])
def test_all_looks_hold_at_once_in_95_of_100_samples(mean: float):
    rng = np.random.default_rng(1)
    misses = 0
    for _ in range(300):
        values = (rng.uniform(size=128) < mean).astype(float)
        for looked in (8, 16, 32, 64, 128):
            low, high = mean_interval(values[:looked], lowest=0.0, highest=1.0)
            if not low <= mean <= high:
                misses += 1
                break
    assert misses <= 0.05 * 300
