"""Prompts as text, chat messages or token ids, from every form of data set."""

import numpy as np
import pytest
import torch
from datasets import Dataset

from ppo_core.data.encode_prompts import (
    encode_dialogue,
    encode_prompt,
    encode_prompts,
    prompt_text,
    response_segments,
)
from ppo_core.data.prompts import prompts_of
from ppo_core.data.segments import encode_sequence
from ppo_core.errors import DataError
from tests.helpers.models.chat import ASSISTANT, ENDED, OPEN, USER, make_chat_tokenizer, say
from tests.helpers.models.tiny import EOS, make_tokenizer

# --- From data sets to prompts -----------------------------------------------------

ROWS = [
    ({"prompt": "w0"}, "w0"),
    ({"prompt": say("w0")}, say("w0")),
    ({"messages": say("w0", "w1", "w2")}, say("w0", "w1", "w2")),
    ({"messages": say("w0", "w1")}, say("w0")),
    ({"query": "w0", "reference": "w1"}, "w0"),
    ({"input_ids": [3, 4], "query": "w0"}, [3, 4]),
    ({"input_ids": [0, 0, 3, 4], "attention_mask": [0, 0, 1, 1]}, [3, 4]),
    ({"prompt": None, "messages": say("w0")}, say("w0")),
]


@pytest.mark.parametrize(("row", "prompt"), ROWS)
def test_a_row_gives_its_prompt_from_a_list_and_from_a_data_set(row, prompt):
    assert prompts_of([row]) == [prompt]
    assert prompts_of(Dataset.from_list([row])) == [prompt]


def test_padding_of_tensors_is_stripped():
    rows = Dataset.from_list([{"input_ids": [0, 3, 0], "attention_mask": [0, 1, 1]}])
    assert prompts_of(rows.with_format("torch")) == [[3, 0]]


def test_a_list_of_prompts_stays_as_it_is():
    prompts = ["w0", say("w1"), [3, 4], torch.tensor([5])]
    assert prompts_of(prompts) == prompts


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([{"prompt": "w0"}, {"text": "w0", "label": 1}], "Row 1 .* has the columns text, label"),
        ([{"prompt": None}], "Row 0 has no prompt"),
        (
            [{"input_ids": [3, 4], "attention_mask": [1]}],
            "Row 0 has 2 input_ids",
        ),
        ("imdb", "single text, 'imdb', not a data set"),
    ],
)
def test_a_data_set_without_prompts_is_refused(dataset, message):
    with pytest.raises(DataError, match=message):
        prompts_of(dataset)


# --- From prompts to token ids -------------------------------------------------------


@pytest.mark.parametrize("ids", [[3, EOS], (3, EOS), np.array([3, EOS]), torch.tensor([3, EOS])])
def test_token_ids_are_taken_as_they_are(ids):
    encoded = encode_prompt(make_tokenizer(), ids)
    assert encoded == [3, EOS]
    assert all(type(token) is int for token in encoded)


def test_messages_are_encoded_up_to_where_the_assistant_answers():
    tokenizer = make_chat_tokenizer()
    assert encode_prompt(tokenizer, say("w0")) == [USER, 3, ASSISTANT]
    assert encode_prompt(tokenizer, say("w0", "w1", "w2")) == [
        *(USER, 3, ASSISTANT, 4, EOS),
        *(USER, 5, ASSISTANT),
    ]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([3, 61], "token id 61, .* 61 tokens"),
        ([-1], "token id -1"),
        ([3.0], "not list: .3.0."),
        (["w0"], "not list: .'w0'."),
        (torch.tensor([[3]]), "text, chat messages or token ids"),
        (None, "not NoneType"),
        (say("w0"), "no chat template"),
        ("w0 \ud83d", "has '.ud83d', half of a surrogate pair"),
    ],
)
def test_what_is_no_prompt_of_this_tokenizer_is_refused(prompt, message):
    with pytest.raises(DataError, match=message):
        encode_prompt(make_tokenizer(), prompt)


def test_two_processes_encode_as_one_does_whatever_the_prompts_are():
    tokenizer = make_chat_tokenizer()
    prompts = ["w0 w1", say("w2"), [3, 4], torch.tensor([5]), np.array([6, 7])]
    expected = [[3, 4], [USER, 5, ASSISTANT], [3, 4], [5], [6, 7]]
    assert encode_prompts(tokenizer, prompts) == expected
    assert encode_prompts(tokenizer, prompts, num_proc=2) == expected
    assert encode_prompts(tokenizer, [], num_proc=2) == []


@pytest.mark.parametrize("num_proc", [None, 2])
def test_a_prompt_that_cannot_be_encoded_is_named_by_its_row(num_proc):
    with pytest.raises(DataError, match="Row 1: A prompt has the token id 99"):
        encode_prompts(make_tokenizer(), ["w0", [99]], num_proc=num_proc)


# --- What a reward model reads -------------------------------------------------------


def test_text_is_encoded_apart_and_joined():
    tokenizer = make_tokenizer()
    dialogue = encode_dialogue(tokenizer, "w0", "w1", end=True)
    response = encode_sequence(tokenizer, response_segments(tokenizer, "w1", end=True))
    assert dialogue == encode_prompt(tokenizer, "w0") + response
    assert dialogue == [3, 4, EOS]
    assert encode_dialogue(tokenizer, "w0", "w1", end=False) == [3, 4]


@pytest.mark.parametrize("template", [ENDED, OPEN])
def test_messages_are_rendered_by_the_reward_models_own_template(template):
    tokenizer = make_chat_tokenizer(template)
    dialogue = encode_dialogue(tokenizer, say("w0"), "w1", end=True)
    assert dialogue == [USER, 3, ASSISTANT, 4, EOS]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (say("w0"), "no chat template"),
        ([3, 4], "Decode token ids with the tokenizer that encoded the prompt"),
    ],
)
def test_what_a_reward_model_cannot_read_is_refused(prompt, message):
    with pytest.raises(DataError, match=message):
        encode_dialogue(make_tokenizer(), prompt, "w1", end=True)


# --- What people read ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("w0 w1", "w0 w1"),
        (say("w0"), "<user> w0 <assistant> "),
        ([0, 3, 4, EOS], "w0 w1"),
        (torch.tensor([3]), "w0"),
    ],
)
def test_every_prompt_can_be_shown_as_text(prompt, text):
    assert prompt_text(make_chat_tokenizer(), prompt) == text
