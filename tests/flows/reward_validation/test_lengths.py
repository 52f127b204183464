import json
import warnings
from dataclasses import asdict
from random import Random

import pytest

from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.results.reward_report import Lengths
from pipeline.reward_validation.lengths import measure_lengths


def pair(chosen: int, rejected: int, *, tie: bool = False) -> LabeledPair:
    """A pair of responses with so many characters."""
    return LabeledPair(prompt="p", chosen="c" * chosen, rejected="r" * rejected, tie=tie)


def measure(scores: list[tuple[float, float]], pairs: list[LabeledPair], **samples) -> Lengths:
    chosen, rejected = zip(*scores, strict=True)
    given = {"sample_scores": [[0.0, 1.0]], "samples": [["a", "bb"]], **samples}
    return measure_lengths(chosen, rejected, pairs, given["sample_scores"], given["samples"])


def test_the_correlation_is_that_of_the_ranks_of_all_responses():
    # Lengths 1 9 | 2 80, scores 1 40 | 30 2: ranks 1 3 2 4 and 1 4 3 2.
    # 1 - 6 * (0 + 1 + 1 + 4) / (4 * 15) = 0.4
    result = measure([(1, 30), (40, 2)], [pair(1, 2), pair(9, 80)])
    assert result.correlation == pytest.approx(0.4)


def test_within_prompts_the_correlation_is_a_mean_over_prompts():
    # Longer is better for one prompt, worse for another; of three, ranks 1 2 3 and 1 3 2: 0.5.
    result = measure(
        [(1, 0)],
        [pair(1, 2)],
        samples=[["a", "bb", "ccc"]] * 3,
        sample_scores=[[1, 2, 3], [9, 8, 7], [1, 3, 2]],
    )
    assert result.within_prompts == pytest.approx((1 - 1 + 0.5) / 3)
    assert result.prompts == 3


def test_a_prompt_that_decides_score_and_length_is_no_correlation_within():
    # Across prompts long answers score higher, within each the short ones do.
    samples = [["a", "bb"], ["a" * 101, "a" * 102]]
    result = measure([(1, 0)], [pair(1, 2)], samples=samples, sample_scores=[[2, 1], [102, 101]])
    assert result.within_prompts == pytest.approx(-1)


def test_prompts_where_nothing_varies_are_left_out():
    result = measure(
        [(1, 0)],
        [pair(1, 2)],
        samples=[["a", "bb"], ["aa", "bb"], ["a", "bb"]],
        sample_scores=[[1, 2], [1, 2], [5, 5]],
    )
    assert (result.within_prompts, result.prompts) == (pytest.approx(1), 1)


def test_what_does_not_vary_has_no_correlation():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        constant = measure(
            [(1, 1), (1, 1)], [pair(1, 2), pair(3, 4)], samples=[["a", "b"]], sample_scores=[[1, 2]]
        )
        same_length = measure([(1, 2)], [pair(3, 3)])
    assert (constant.correlation, constant.within_prompts, constant.prompts) == (None, None, 0)
    assert same_length.correlation is None
    assert (same_length.shorter, same_length.longer) == (None, None)


def test_accuracy_is_told_apart_by_the_side_that_is_longer():
    # Shorter chosen: right, wrong, equal scores. Longer chosen: right. Same length, tie: neither.
    scores = [(2, 1), (1, 2), (1, 1), (2, 1), (2, 1), (2, 1)]
    pairs = [pair(1, 2), pair(1, 2), pair(1, 2), pair(2, 1), pair(2, 2), pair(1, 2, tie=True)]
    result = measure(scores, pairs)
    assert (result.shorter.accuracy, result.shorter.n) == (0.5, 3)
    assert (result.longer.accuracy, result.longer.n) == (1.0, 1)
    assert result.shorter.low < 0.5 < result.shorter.high


def test_a_model_that_counts_characters_is_seen_through():
    rng = Random(0)
    pairs = [pair(rng.randrange(1, 99), rng.randrange(1, 99)) for _ in range(200)]
    samples = [["x" * rng.randrange(1, 99) for _ in range(8)] for _ in range(10)]
    result = measure(
        [(len(p.chosen), len(p.rejected)) for p in pairs],
        pairs,
        samples=samples,
        sample_scores=[[len(text) for text in group] for group in samples],
    )
    assert result.correlation == pytest.approx(1)
    assert result.within_prompts == pytest.approx(1)
    assert result.shorter.accuracy == 0
    assert result.shorter.high < 0.05
    assert result.longer.accuracy == 1
    assert json.loads(json.dumps(asdict(result))) == asdict(result)


def test_a_model_that_does_not_look_at_length_is_not_accused():
    rng = Random(0)
    pairs = [pair(rng.randrange(1, 99), rng.randrange(1, 99)) for _ in range(2000)]
    result = measure([(rng.random(), rng.random()) for _ in pairs], pairs)
    # The standard error of a correlation of 4,000 is 0.016, of an accuracy of 1,000 likewise.
    assert abs(result.correlation) < 0.06
    assert result.shorter.accuracy == pytest.approx(0.5, abs=0.06)
