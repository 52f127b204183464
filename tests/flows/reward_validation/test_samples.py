"""How a reward model scores samples of the policy."""

import json
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from pipeline.reward_validation.samples import best_of, draw_samples, duplicates, measure_samples
from pipeline.settings.decoding import Decoding
from ppo_core.errors import DataError, ModelError
from ppo_core.training.answer_job import AnswerJob, run_answer_job
from tests.helpers.inputs.pipeline_inputs import write_model

SCORES = np.array([[0.0, 2.0], [6.0, 4.0]])

SAMPLING = Decoding(response_length=6, temperature=1.0)


def draw(path: str, prompts: list[str], count: int, *, seed: int = 1, decoding=SAMPLING):
    def answer(asked: list[str]) -> list[str]:
        job = AnswerJob(
            policy=path,
            tokenizer=path,
            prompts=asked,
            prompt_format="auto",
            response_length=decoding.response_length,
            temperature=decoding.temperature,
            stop=decoding.stop_token,
            stop_token_id=decoding.stop_token_id,
            seed=seed,
            batch_size=5,
        )
        return run_answer_job(job).texts

    return draw_samples(answer, prompts, samples_per_prompt=count)


def test_the_spread_is_the_one_done_by_hand():
    # All: mean 3, squares 9+1+9+1 = 20, over 4-1. Within: 2 and 2, each 1+1 over 2-1.
    samples = measure_samples(SCORES, None, seed=1)
    assert (samples.prompts, samples.per_prompt, samples.mean) == (2, 2, 3.0)
    assert samples.deviation == pytest.approx((20 / 3) ** 0.5)
    assert samples.within_prompts == pytest.approx(2**0.5)
    assert (samples.minimum, samples.maximum) == (0.0, 6.0)
    assert samples.references is None


def test_quantiles_lie_between_the_samples():
    # 21 samples 0 .. 20: 5 % of the way is 1, a quarter 5, half 10.
    samples = measure_samples(np.arange(21.0)[None], None, seed=1)
    expected = {"5": 1, "25": 5, "50": 10, "75": 15, "95": 19}
    assert samples.quantiles == pytest.approx(expected)


def test_the_histogram_holds_every_sample():
    # 0 and 6 are the ends, so a bin is 0.2 wide: 2.0 begins bin 10, 4.0 bin 20.
    samples = measure_samples(SCORES, None, seed=1)
    assert [number for number, count in enumerate(samples.counts) if count] == [0, 10, 20, 29]
    assert sum(samples.counts) == 4
    assert samples.edges == pytest.approx(np.linspace(0, 6, 31).tolist())


def test_the_best_of_two_is_the_mean_over_all_pairs():
    # Of 1, 2, 4 the pairs have the maxima 2, 4, 4; of 0, 0, 3 they have 0, 3, 3.
    scores = np.array([[4.0, 1.0, 2.0], [0.0, 3.0, 0.0]])
    assert best_of(scores, 2) == pytest.approx((10 / 3 + 2) / 2)
    assert best_of(scores, 1) == pytest.approx(scores.mean())
    assert best_of(scores, 3) == pytest.approx(3.5)


def test_the_best_of_k_is_the_mean_over_every_choice_and_grows_with_k():
    scores = np.random.default_rng(0).normal(size=(3, 7))
    curve = [best_of(scores, k) for k in range(1, 8)]
    expected = [
        np.mean([max(chosen) for row in scores for chosen in combinations(row, k)])
        for k in range(1, 8)
    ]
    assert curve == pytest.approx(expected)
    assert curve == sorted(curve)


@pytest.mark.parametrize(("count", "sizes"), [(2, "1 2"), (6, "1 2 4 6"), (8, "1 2 4 8")])
def test_the_curve_has_powers_of_two_and_all_samples(count: int, sizes: str):
    samples = measure_samples(np.arange(float(count))[None], None, seed=1)
    assert list(samples.best_of) == sizes.split()
    assert samples.best_of[str(count)] == count - 1


def test_references_win_against_a_random_sample_of_their_own_prompt():
    # 1 is above one of 0 and 2; 6 is above 4 and equal to 6: (0.5 + 0.75) / 2.
    references = measure_samples(SCORES, [1.0, 6.0], seed=1).references
    assert references.mean == 3.5
    assert references.above_samples == 0.625
    # Two prompts drawn with replacement: twice the one, one of each, or twice the other.
    assert (references.low, references.high) == (0.5, 0.75)


def test_the_interval_is_by_prompt():
    # 100 prompts, half of whose references beat all samples: 0.5 +- 1.96 * 0.05.
    scores = np.tile([0.0, 0.0], (100, 1))
    references = np.repeat([1.0, -1.0], 50)
    first = measure_samples(scores, references, seed=1).references
    assert first.above_samples == 0.5
    assert (first.low, first.high) == pytest.approx((0.402, 0.598), abs=0.02)
    many = measure_samples(np.tile(scores, 20), references, seed=1).references
    assert many.high - many.low == pytest.approx(first.high - first.low)


def test_the_seed_decides_the_interval():
    rng = np.random.default_rng(0)
    scores, references = rng.normal(size=(40, 7)), rng.normal(size=40)
    first, again, other = (
        measure_samples(scores, references, seed=seed).references for seed in (1, 1, 2)
    )
    assert first == again
    assert (first.low, first.high) != (other.low, other.high)


def test_a_single_prompt_says_nothing_of_others():
    references = measure_samples(SCORES[:1], [5.0], seed=1).references
    assert (references.low, references.above_samples, references.high) == (0, 1, 1)


@pytest.mark.parametrize("scores", [[], [1.0, 2.0], [[1.0], [2.0]]])
def test_fewer_than_two_samples_a_prompt_are_refused(scores: list):
    with pytest.raises(DataError, match="at least two samples per prompt"):
        measure_samples(scores, None, seed=1)


def test_references_of_other_prompts_are_refused():
    with pytest.raises(DataError, match=r"shape \(3,\), but the samples are of 2 prompts"):
        measure_samples(SCORES, [1.0, 2.0, 3.0], seed=1)


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(ModelError, match="1 of 4 samples are not finite"):
        measure_samples([[0.0, 1.0], [float("nan"), 1.0]], None, seed=1)
    with pytest.raises(ModelError, match="1 of 2 references are not finite"):
        measure_samples(SCORES, [float("inf"), 1.0], seed=1)


def test_the_record_is_json():
    record = asdict(measure_samples(SCORES, [1.0, 6.0], seed=1))
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_duplicates_are_counted_within_prompts():
    # The second a, and nothing else: the b of the other prompt is not a duplicate.
    assert duplicates([["a", "a", "b"], ["b", "c", "d"]]) == 1 / 6
    assert duplicates([["a", "a", "a", "a"]]) == 0.75


def test_every_prompt_gets_its_own_samples(tmp_path: Path):
    path = write_model(tmp_path)
    prompts = ["w1 w2", "w3"]
    samples = draw(path, prompts, 40)
    assert [len(group) for group in samples] == [40, 40]
    assert duplicates(samples) < 0.5
    assert samples == draw(path, prompts, 40)
    assert samples != draw(path, prompts, 40, seed=2)
    # At temperature 0 a prompt has one answer, and the two prompts have different ones.
    greedy = replace(SAMPLING, temperature=0.0)
    first, second = draw(path, prompts, 3, decoding=greedy)
    assert (len(set(first)), len(set(second)), first == second) == (1, 1, False)


def test_samples_end_as_those_of_training_do(tmp_path: Path):
    path = write_model(tmp_path)
    free = replace(SAMPLING, stop_token=None)
    (samples,) = draw(path, ["w1"], 30, decoding=free)
    (ended,) = draw(path, ["w1"], 30)
    assert ended != samples
    assert all(long.startswith(short) for long, short in zip(samples, ended, strict=True))
    word = samples[0].split()[2]
    token = int(word[1:]) + 3
    stopped = replace(SAMPLING, stop_token_id=token)
    (cut,) = draw(path, ["w1"], 30, decoding=stopped)
    assert not any(word in text.split() for text in cut)
    assert samples[0].startswith(cut[0])
