"""Lengths and repetition of answers in words."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluation.evaluate_policies import mean_words, repeated_share
from ppo_core.algorithm.repetition import repeated_share as of_tokens
from ppo_core.data.batching import pad_rows


def test_words_are_what_stands_between_spaces():
    assert mean_words(["one", " two  words\n", "", "it's one-and-a-half, or so"]) == 7 / 4


def test_repetition_by_hand():
    # aba bab aba bab abc: five 3-grams, three different ones
    assert repeated_share(["a b a b a b c"]) == pytest.approx(2 / 5)
    assert repeated_share(["a b a b a b c", "one two three"]) == pytest.approx(1 / 5)
    assert repeated_share(["a a b b"], n=1) == 1 / 2
    assert repeated_share(["a b a b a b c", *["one two three"] * 9]) == pytest.approx(1 / 5)


def test_an_answer_with_no_room_for_a_repeat_has_none():
    assert repeated_share(["", "so", "so so so"]) == 0.0


def test_a_policy_that_says_one_word_over_and_over_is_all_repetition():
    assert repeated_share(["yes " * 100]) == pytest.approx(97 / 98)


LOOPED = {"Chinese": "今天天气很好。", "Japanese": "とても楽しいです。", "Thai": "วันนี้อากาศดีมาก"}


@pytest.mark.parametrize("unit", LOOPED.values(), ids=LOOPED)
def test_a_script_without_spaces_has_a_word_for_each_character(unit: str):
    assert mean_words([unit * 40, unit * 4, unit[:5]]) == pytest.approx((44 * len(unit) + 5) / 3)
    assert repeated_share([unit * 40]) > 0.9


@given(
    st.lists(st.text("ab.,\n ", max_size=12), min_size=1), st.sampled_from([" ", "\n\n", " " * 40])
)
def test_words_between_spaces_are_as_long_as_before(words: list[str], space: str):
    text = space.join(words)
    assert mean_words([text]) == len(text.split())


@given(st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=4, unique_by=tuple))
def test_words_repeat_as_tokens_do(rows: list[list[int]]):
    ids, lengths = pad_rows(rows)
    expected = of_tokens(ids, lengths).to(torch.float64).mean().item()
    assert repeated_share([" ".join(map(str, row)) for row in rows]) == pytest.approx(
        expected, abs=1e-6
    )
