"""Comparisons of two models on the same pairs."""

import numpy as np
import pytest

from pipeline.evaluation.pair_accuracy import is_ahead


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
    assert is_ahead(*(np.array([*row], dtype=float) for row in (one, other))) is expected


def test_of_equal_models_each_is_rarely_ahead():
    # One standard error of a normal distribution: 16 % lie above it.
    rng = np.random.default_rng(0)
    ahead = [is_ahead(*(rng.random((2, 200)) < 0.6).astype(float)) for _ in range(2000)]
    assert np.mean(ahead) == pytest.approx(0.159, abs=0.03)
