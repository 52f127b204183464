import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from scipy.special import expit

from pipeline.reward_validation.calibration import calibrate


def drawn(n: int, *, sharper: float = 1.0, seed: int = 0) -> np.ndarray:
    """Margins of a model that is `sharper` times as sure as it should be."""
    generator = np.random.default_rng(seed)
    sizes = generator.exponential(1.5, n)
    right = generator.random(n) < expit(sizes)
    return sharper * np.where(right, sizes, -sizes)


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_the_figures_match_the_sums_done_by_hand():
    # 0.6 sure, right in 1 of 2, and 0.9 sure, right in 2 of 3, 20 times over: a bin each.
    # error = 2/5 * |.5 - .6| + 3/5 * |2/3 - .9| = .04 + .14
    # brier = (.4^2 + .6^2 + .1^2 + .1^2 + .9^2) / 5 = 1.35 / 5
    # log loss = -(ln .6 + ln .4 + 2 ln .9 + ln .1) / 5
    a, b = logit(0.6), logit(0.9)
    result = calibrate([a, -a, b, b, -b] * 20)
    assert [(bin.n, bin.accuracy) for bin in result.bins] == [(40, 0.5), (60, 2 / 3)]
    assert [bin.confidence for bin in result.bins] == pytest.approx([0.6, 0.9])
    assert result.error == pytest.approx(0.18)
    assert result.brier == pytest.approx(0.27)
    logs = math.log(0.6) + math.log(0.4) + 2 * math.log(0.9) + math.log(0.1)
    assert result.log_loss == pytest.approx(-logs / 5)


def test_a_model_that_claims_less_than_it_knows_is_not_overconfident():
    # Right in 3 of 4; sigmoid(0.01) = 0.5025, sigmoid(5) = 0.9933.
    quiet, loud = (calibrate([size] * 3 + [-size]) for size in (0.01, 5.0))
    assert quiet.overconfidence == pytest.approx(0.5025 - 0.75, abs=1e-4)
    assert loud.overconfidence == pytest.approx(0.9933 - 0.75, abs=1e-4)
    assert quiet.error == pytest.approx(-quiet.overconfidence)


def test_a_coin_is_perfectly_calibrated_at_one_half():
    result = calibrate([0.0] * 20)
    assert result.error == 0
    assert result.brier == 0.25
    assert result.log_loss == pytest.approx(math.log(2))
    assert [(bin.n, bin.accuracy, bin.confidence) for bin in result.bins] == [(20, 0.5, 0.5)]
    assert result.temperature is None


def test_bins_have_equal_counts_and_go_from_unsure_to_sure():
    result = calibrate(drawn(1000))
    assert [bin.n for bin in result.bins] == [100] * 10
    confidences = [bin.confidence for bin in result.bins]
    assert confidences == sorted(confidences)
    assert 0.5 <= confidences[0] < confidences[-1] <= 1
    assert all(bin.low < bin.accuracy < bin.high for bin in result.bins)


def test_few_pairs_make_few_bins_and_no_large_error_of_chance():
    assert [bin.n for bin in calibrate(drawn(100)).bins] == [25] * 4
    assert [bin.n for bin in calibrate(drawn(6)).bins] == [6]
    # Six right of six, 0.6 sure each: one bin, off by 1 - 0.6, however many bins there could be.
    assert calibrate([logit(0.6)] * 6).error == pytest.approx(0.4)


def test_the_order_of_the_pairs_and_equal_margins_change_nothing():
    margins = np.round(drawn(500), 1)
    shuffled = np.random.default_rng(1).permutation(margins)
    one, other = calibrate(margins), calibrate(shuffled)
    assert [bin.n for bin in one.bins] == [bin.n for bin in other.bins]
    assert one.error == pytest.approx(other.error)


def test_a_calibrated_model_has_an_error_as_small_as_chance_makes_it():
    assert calibrate(drawn(20_000)).error < 0.4 * math.sqrt(10 / 20_000)


@pytest.mark.parametrize("sharper", [0.25, 4.0])
def test_a_model_too_sure_or_too_unsure_has_an_error_and_the_temperature_mends_it(sharper: float):
    margins = drawn(20_000, sharper=sharper)
    result = calibrate(margins)
    assert result.error > 0.1
    # The standard error of the temperature is below 2 %.
    assert result.temperature == pytest.approx(sharper, rel=0.06)
    mended = calibrate(margins / result.temperature)
    assert mended.error < 0.02
    assert mended.log_loss < result.log_loss
    assert mended.temperature == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("size", [1e-3, 2.0, 500.0])
def test_the_temperature_makes_the_confidence_the_accuracy(size: float):
    # Right in 3 of 4: sigmoid(size / T) = .75, so T = size / ln 3.
    result = calibrate([size, size, size, -size])
    assert result.temperature == pytest.approx(size / math.log(3), rel=1e-4)


@pytest.mark.parametrize(("right", "wrong"), [(51, 49), (999, 1)])
def test_the_temperature_is_found_however_far_it_is(right: int, wrong: int):
    # sigmoid(1 / T) = right / (right + wrong), so T = 1 / ln(right / wrong): 25, and 0.145.
    result = calibrate([1.0] * right + [-1.0] * wrong)
    assert result.temperature == pytest.approx(1 / math.log(right / wrong), rel=1e-3)


@pytest.mark.parametrize(
    "margins", [[1.0, 2.0], [0.0, 1.0], [-1.0, 1.0], [-2.0, 1.0], [-1.0, -3.0]]
)
def test_no_temperature_is_best_for_a_model_that_is_never_or_on_average_wrong(margins):
    assert calibrate(margins).temperature is None


def test_a_model_that_is_sure_and_wrong_is_not_spared():
    # 100 nats for the pair that is wrong, none for the other.
    result = calibrate([100.0, -100.0])
    assert result.log_loss == pytest.approx(50)
    assert result.brier == pytest.approx(0.5)
    assert result.error == pytest.approx(0.5)


def test_a_record_is_plain_json():
    record = asdict(calibrate(drawn(50)))
    assert json.loads(json.dumps(record)) == record
