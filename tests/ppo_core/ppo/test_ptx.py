"""Pretraining texts mixed into PPO."""

import json

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from ppo_core.errors import DataError, TrainingError
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.ptx import PretrainingTexts, joined_texts, pretraining_loss
from tests.helpers.models.tiny import make_policy, make_prompts


def numbered(count: int) -> list[list[int]]:
    """Text i is (i, 50)."""
    return [[i, 50] for i in range(count)]


def drawn(texts: PretrainingTexts, *batches: int) -> list[int]:
    return [text[0] for n in batches for text in texts.next_texts(n)]


def test_every_token_but_the_first_is_counted():
    rows = joined_texts([[5, 6, 7], [8, 9]])
    assert rows.ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert rows.lengths.tolist() == [3, 2]
    assert rows.prompt_lengths.tolist() == [1, 1]
    assert rows.row.tolist() == [0, 0, 1]
    assert rows.state.tolist() == [0, 1, 0]
    assert rows.targets.tolist() == [6, 7, 9]


def test_the_loss_is_the_language_modelling_loss_of_transformers():
    model, texts = make_policy(), make_prompts([7, 2, 4])
    with torch.no_grad():
        logprobs, *_ = LanguageModel(model)(joined_texts(texts), 1.0)
        losses = [model(input_ids=tensor([t]), labels=tensor([t])).loss for t in texts]
    # transformers gives the mean over a text's own tokens: 6, 1 and 3 of them.
    expected = (6 * losses[0] + losses[1] + 3 * losses[2]) / 10
    found = pretraining_loss(1 / 10)(logprobs, slice(None)).sum()
    assert_close(found, expected, rtol=1e-5, atol=0)


def test_the_loss_by_hand():
    losses = pretraining_loss(0.5)(tensor([-1.0, -2.0, -6.0]), slice(None))
    assert losses.tolist() == [0.5, 1.0, 3.0]


def test_a_pass_has_every_text_once_in_a_new_order():
    texts = PretrainingTexts(numbered(20), seed=1)
    first, second = drawn(texts, 20), drawn(texts, 20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_the_batch_size_does_not_change_the_order():
    order = drawn(PretrainingTexts(numbered(5), seed=1), 12)
    assert drawn(PretrainingTexts(numbered(5), seed=1), 3, 4, 5) == order
    assert drawn(PretrainingTexts(numbered(5), seed=2), 12) != order


@pytest.mark.parametrize("before", [0, 3, 5, 8])
def test_resumed_texts_go_on_in_the_same_order(before):
    texts = PretrainingTexts(numbered(5), seed=1)
    drawn(texts, *[1] * before)
    state = json.loads(json.dumps(texts.state_dict()))
    expected = drawn(texts, 13)
    resumed = PretrainingTexts(numbered(5), seed=7)
    resumed.load_state_dict(state)
    assert drawn(resumed, 13) == expected


def test_resuming_with_other_texts_is_refused():
    state = PretrainingTexts(numbered(5), seed=1).state_dict()
    with pytest.raises(TrainingError, match="with 5 pretraining texts, but this run has 6"):
        PretrainingTexts(numbered(6), seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "There are no pretraining texts"),
        ([[1, 2], [3]], r"text 1 has 1 token\(s\)"),
        ([[]], r"text 0 has 0 token\(s\)"),
        ([[1, 2, 3, 4], [1, 2, 3, 4, 5]], "text 1 has 5 tokens, more than .* length of 4"),
    ],
    ids=["none", "one token", "empty", "too long"],
)
def test_texts_that_cannot_be_learned_from_are_refused(rows, words):
    with pytest.raises(DataError, match=words):
        PretrainingTexts(rows, seed=1, max_length=4)
