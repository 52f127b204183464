"""Prompts of a run: as given in a data set, and as token ids."""

import dataclasses

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithPadding

from ppo_core.data.prompt_set import make_prompt_set
from ppo_core.errors import DataError
from tests.helpers.models.chat import ASSISTANT, OPEN, USER, make_chat_tokenizer, say
from tests.helpers.models.tiny import PAD, VOCABULARY, make_policy, make_tokenizer
from tests.ppo_core.training.test_trainer import CONFIG, make_trainer

ROWS = [[5, 6, 7], [8], [9, 10]]


def prompt_set(dataset, *, tokenizer=None, collator=None, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return make_prompt_set(dataset, tokenizer or make_tokenizer(), make_policy(), config, collator)


def make_padding_tokenizer():
    """Return a tokenizer with an added pad token, which has no embedding."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == VOCABULARY
    return tokenizer


def padded(side: str, *, pad: int, with_mask: bool = True) -> Dataset:
    columns = {"input_ids": [], "attention_mask": []}
    for row in ROWS:
        fillers, real = [pad] * (4 - len(row)), [1] * len(row)
        none = [0] * len(fillers)
        left = side == "left"
        columns["input_ids"].append(fillers + row if left else row + fillers)
        columns["attention_mask"].append(none + real if left else real + none)
    if not with_mask:
        del columns["attention_mask"]
    return Dataset.from_dict(columns)


def test_texts_messages_and_token_ids_are_prompts():
    tokenizer = make_chat_tokenizer(OPEN)
    prompts = ["w1 w2", say("w3"), [6, 7]]
    made = prompt_set(prompts, tokenizer=tokenizer)
    assert made.tokens == [[4, 5], [USER, 6, ASSISTANT], [6, 7]]
    assert made.prompts == prompts
    assert len(made) == 3


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_messages_in_a_data_set_are_prompts(column):
    dataset = Dataset.from_dict({column: [say("w1"), say("w2", "w3", "w4")]})
    made = prompt_set(dataset, tokenizer=make_chat_tokenizer(OPEN))
    assert made.tokens[0] == [USER, 4, ASSISTANT]
    assert made.tokens[1] == [USER, 5, ASSISTANT, 6, USER, 7, ASSISTANT]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [PAD, VOCABULARY])
def test_what_the_attention_mask_hides_is_padding(side, pad):
    made = prompt_set(padded(side, pad=pad), tokenizer=make_padding_tokenizer())
    assert made.tokens == ROWS


def test_a_pad_token_that_is_a_real_one_elsewhere_is_kept_where_the_mask_counts_it():
    dataset = [{"input_ids": [PAD, 5, PAD], "attention_mask": [0, 1, 1]}]
    assert prompt_set(dataset).tokens == [[5, PAD]]


def test_tensors_of_token_ids_will_do():
    dataset = Dataset.from_dict({"input_ids": ROWS}).with_format("torch")
    assert prompt_set(dataset).tokens == ROWS


@pytest.mark.parametrize("multiple", [None, 8])
def test_a_collator_pads_and_the_embeddings_never_see_it(multiple):
    tokenizer = make_padding_tokenizer()
    collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
    made = prompt_set(
        Dataset.from_dict({"input_ids": ROWS}), tokenizer=tokenizer, collator=collator
    )
    assert made.tokens == ROWS


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_that_are_padded_already_go_through_a_collator(side):
    tokenizer = make_padding_tokenizer()
    made = prompt_set(
        padded(side, pad=VOCABULARY),
        tokenizer=tokenizer,
        collator=DataCollatorWithPadding(tokenizer),
    )
    assert made.tokens == ROWS


def test_a_collator_that_gives_no_token_ids_is_refused():
    with pytest.raises(DataError, match="collator returned labels, but no input_ids"):
        prompt_set([{"x": 1}], collator=lambda rows: {"labels": torch.zeros(1, 1)})


def test_tokens_that_the_embeddings_do_not_have_are_refused():
    dataset = padded("left", pad=VOCABULARY, with_mask=False)
    with pytest.raises(DataError, match=f"Prompt 0 has the token {VOCABULARY}.*{VOCABULARY}"):
        prompt_set(dataset, tokenizer=make_padding_tokenizer())


def test_prompts_without_room_for_a_response_are_refused():
    with pytest.raises(DataError, match="longer than 60 tokens"):
        prompt_set([[5] * 61], response_length=4)
    with pytest.raises(DataError, match="There are no prompts"):
        prompt_set([])


def test_a_script_with_an_added_pad_token_trains_as_one_without():
    runs = []
    for tokenizer in (make_tokenizer(), make_padding_tokenizer()):
        collator = DataCollatorWithPadding(tokenizer)
        dataset = Dataset.from_dict({"input_ids": ROWS})
        trainer = make_trainer(prompts=dataset, data_collator=collator, processing_class=tokenizer)
        runs.append(trainer.step())
    for name in ("objective/kl", "objective/entropy", "loss/policy_avg"):
        assert runs[0][name] == runs[1][name]
