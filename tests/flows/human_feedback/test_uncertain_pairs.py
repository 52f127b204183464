"""The pairs on which reward models differ most, by hand."""

import json
from itertools import combinations

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
    others = [f"Write about {word}" for word in ("rain", "bread", "ships", "music", "stones")]
    prompts = [LONG, changed, "another", "another", *others]
    answers, count = [["a", "b"]] * len(prompts), len(prompts)
    sizes = (1.0, 3.0, 2.0, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
    scores = np.array([[[0, 0], [size, -size]] for size in sizes])
    chosen = [pair.prompt for pair in uncertain_pairs(prompts, answers, scores, count)]
    assert chosen == [changed, "another", *others]
    drawn = [pair.prompt for pair in random_pairs(prompts, answers, count, seed=1)]
    assert len(drawn) == 7 and set(drawn) > {"another", *others}


def test_an_instruction_that_all_prompts_share_makes_no_copies():
    shared = "Translate the following English sentence into natural and idiomatic German please:"
    words = "river table window garden silver morning letter castle".split()
    prompts = [f"{shared} the {one} of my {two}" for one, two in combinations(words, 2)]
    assert len(random_pairs(prompts, [["a", "b"]] * len(prompts), 99, seed=0)) == len(prompts)


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
