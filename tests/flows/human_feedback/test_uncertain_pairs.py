"""The pairs on which reward models differ most, by hand."""

import json

import numpy as np
import pytest

from human_feedback.uncertain_pairs import preference_variance, random_pairs, uncertain_pairs

ONE, TWO = 0.731059, 0.880797
"""sigmoid(1) and sigmoid(2)."""

LONG = "Tell a short story about a red fox that finds a warm house in the deep snow of the winter"


def test_the_variance_of_a_preference_by_hand():
    # Two models and three answers: 0, 1, 0 and 0, -1, -2.
    scores = np.array([[[0, 0], [1, -1], [0, -2]]], dtype=float)
    variance = preference_variance(scores)
    assert variance.shape == (1, 3, 3)
    # Of 1 against 0 the models say sigmoid(1) and sigmoid(-1), of 2 against 0 1/2 and sigmoid(-2),
    # and of 1 against 2 both sigmoid(1).
    assert variance[0, 1, 0] == pytest.approx(((ONE - (1 - ONE)) / 2) ** 2, abs=1e-6)
    assert variance[0, 2, 0] == pytest.approx(((0.5 - (1 - TWO)) / 2) ** 2, abs=1e-6)
    assert variance[0, 1, 2] == pytest.approx(0, abs=1e-12)
    assert np.allclose(variance, variance.transpose(0, 2, 1))
    assert not np.diagonal(variance, axis1=1, axis2=2).any()


def test_a_score_that_all_answers_share_changes_nothing():
    scores = np.random.default_rng(0).normal(size=(5, 4, 3))
    moved = scores + np.random.default_rng(1).normal(size=(5, 1, 3))
    assert np.allclose(preference_variance(scores), preference_variance(moved))


def test_the_most_uncertain_pair_of_each_prompt_in_the_order_of_the_uncertainty():
    prompts = ["sure", "unsure", "agreed"]
    answers = [["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]]
    scores = np.array(
        [
            [[0, 0], [1, 0], [0, 0]],
            [[0, 0], [0, 0], [3, -3]],
            [[0, 0], [5, 5], [0, 0]],
        ],
        dtype=float,
    )
    pairs = uncertain_pairs(prompts, answers, scores, 3)
    # On the third prompt both models agree on every pair.
    assert [(pair.prompt, {pair.first, pair.second}) for pair in pairs] == [
        ("unsure", {"d", "f"}),
        ("sure", {"a", "b"}),
    ]
    assert pairs[1].deviation == pytest.approx((ONE - 0.5) / 2, abs=1e-6)
    assert uncertain_pairs(prompts, answers, scores, 1) == pairs[:1]


def test_a_prompt_that_resembles_an_earlier_one_is_left_out():
    changed = LONG.replace("red", "brown")
    prompts = [LONG, changed, "another", "another"]
    answers, count = [["a", "b"]] * 4, 4
    scores = np.array([[[0, 0], [size, -size]] for size in (1.0, 3.0, 2.0, 0.5)])
    chosen = [pair.prompt for pair in uncertain_pairs(prompts, answers, scores, count)]
    assert chosen == [changed, "another"]
    drawn = [pair.prompt for pair in random_pairs(prompts, answers, count, seed=1)]
    assert len(drawn) == 2 and "another" in drawn


def test_messages_are_prompts_too():
    prompts = [[{"role": "user", "content": f"question {n}"}] for n in range(3)]
    pairs = random_pairs(prompts, [["a", "b"], ["a", "a"], ["b", "c"]], 9, seed=0)
    assert {json.dumps(pair.prompt) for pair in pairs} == {*map(json.dumps, prompts[::2])}


def test_random_pairs_depend_on_the_seed_alone():
    prompts = [f"p{n}" for n in range(50)]
    answers = [["a", "b", "c"]] * 50
    first = random_pairs(prompts, answers, 20, seed=1)
    assert first == random_pairs(prompts, answers, 20, seed=1)
    assert first != random_pairs(prompts, answers, 20, seed=2)
    assert len({pair.first for pair in first}) == 3
    assert all(pair.first != pair.second for pair in first)
