"""Examples of SFT: token ids and label masks of every form of row, and their batches."""

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from ppo_core.data.encode_prompts import encode_prompt
from ppo_core.data.rows.encoding import encode_row
from ppo_core.data.rows.row_error import RowError
from ppo_core.supervised.examples.sft_examples import (
    IGNORED_LABEL,
    collate_examples,
    example_encoding,
)
from ppo_core.supervised.supervised_config import SupervisedConfig
from tests.helpers.inputs.rows import read_row
from tests.helpers.models.chat import (
    ASSISTANT,
    ENDED,
    FORGETFUL,
    OPEN,
    SYSTEM,
    USER,
    make_chat_tokenizer,
    say,
)
from tests.helpers.models.tiny import EOS, UNK, make_tokenizer

_ = IGNORED_LABEL


def example(row, template=None, **changes):
    """Token ids and labels of one row."""
    tokenizer = make_chat_tokenizer(template)
    read = read_row("demonstrations", row, is_chat=template is not None)
    encoded = encode_row(tokenizer, example_encoding(tokenizer, SupervisedConfig(**changes)), read)
    return encoded["input_ids"], encoded["labels"]


TEXTS = {"prompt": "w0 w1", "completion": "w2"}


def test_of_prompt_and_completion_the_completion_and_its_end_count():
    assert example(TEXTS) == ([3, 4, 5, EOS], [_, _, 5, EOS])
    assert example(TEXTS, end_of_text=False) == ([3, 4, 5], [_, _, 5])
    assert example({**TEXTS, "completion": ""}) == ([3, 4, EOS], [_, _, EOS])


def test_of_a_text_everything_counts():
    assert example({"text": "w0 w1"}) == ([3, 4, EOS], [3, 4, EOS])
    assert example({"text": "w0 w1"}, end_of_text=False) == ([3, 4], [3, 4])


def test_the_prompt_keeps_the_tokenizers_start_token():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", 2)]
    )
    row = encode_row(tokenizer, example_encoding(tokenizer, SupervisedConfig()), TEXTS)
    assert row == {"input_ids": [2, 3, 4, 5, EOS], "labels": [_, _, _, 5, EOS]}


@pytest.mark.parametrize("template", [ENDED, OPEN])
def test_of_messages_every_turn_of_the_assistant_counts_and_nothing_else(template):
    messages = [{"role": "system", "content": "w9"}, *say("w0", "w1 w2", "w3", "w4")]
    ended = [EOS] if template == ENDED else []
    learnt = [_] * len(ended) if template == OPEN else ended
    assert example({"messages": messages}, template) == (
        [SYSTEM, 12, USER, 3, ASSISTANT, 4, 5, *ended, USER, 6, ASSISTANT, 7, EOS],
        [_, _, _, _, _, 4, 5, *learnt, _, _, _, 7, EOS],
    )


def test_messages_after_the_last_answer_do_not_count_and_get_no_end_token():
    ids, labels = example({"messages": say("w0", "w1", "w2")}, ENDED)
    assert ids == [USER, 3, ASSISTANT, 4, EOS, USER, 5]
    assert labels == [_, _, _, 4, EOS, _, _]


@pytest.mark.parametrize(("end_of_text", "ended"), [(True, [EOS]), (False, [])])
def test_an_answer_that_the_template_marks_ends_with_the_end_token_too(end_of_text, ended):
    content = "{{ m.content + ' ' }}"
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<assistant> {% generation %}"
        + f"{content}{{% endgeneration %}}{{% else %}}<user> {content}{{% endif %}}{{% endfor %}}"
    )
    ids, labels = example({"messages": say("w0", "w1")}, template, end_of_text=end_of_text)
    assert (ids, labels) == ([USER, 3, ASSISTANT, 4, *ended], [_, _, _, 4, *ended])


def test_without_an_end_token_an_answer_counts_up_to_its_end():
    tokenizer = make_chat_tokenizer(OPEN)
    tokenizer.eos_token = None
    row = read_row("demonstrations", {"messages": say("w0", "None w1")}, is_chat=True)
    encoding = example_encoding(tokenizer, SupervisedConfig(end_of_text=False))
    assert encode_row(tokenizer, encoding, row)["labels"] == [_, _, _, UNK, 4]


def test_end_of_text_false_adds_nothing_to_messages():
    ids, labels = example({"messages": say("w0", "w1")}, OPEN, end_of_text=False)
    assert (ids, labels) == ([USER, 3, ASSISTANT, 4], [_, _, _, 4])


@pytest.mark.parametrize("completion", [say("w2", "w3")[1:], "w3"])
def test_an_answer_in_the_prompt_does_not_count(completion):
    row = {"prompt": say("w0", "w1", "w2"), "completion": completion}
    assert example(row, ENDED) == (
        [USER, 3, ASSISTANT, 4, EOS, USER, 5, ASSISTANT, 6, EOS],
        [_, _, _, _, _, _, _, _, 6, EOS],
    )


def test_the_context_of_an_answer_is_the_prompt_that_ppo_samples_from():
    prompt = say("w0", "w1", "w2")
    ids, labels = example({"prompt": prompt, "completion": "w3"}, ENDED)
    encoded = encode_prompt(make_chat_tokenizer(ENDED), prompt)
    assert ids[: len(encoded)] == encoded
    assert labels[len(encoded)] == ids[len(encoded)] == 6


@pytest.mark.parametrize(
    "row", [TEXTS, {"messages": say("w0", "w1", "w2")}, {"prompt": say("w0"), "completion": "w1"}]
)
def test_with_completion_only_loss_false_everything_counts(row):
    ids, labels = example(row, ENDED, completion_only_loss=False)
    assert labels == ids


def test_rows_of_a_data_set_are_read_as_those_of_a_list():
    rows = [{"messages": say("w0", "w1")}, {"messages": say("w2", "w3", "w4")}]
    for number, row in enumerate(Dataset.from_list(rows)):
        assert example(row, ENDED) == example(rows[number], ENDED)


# Like Qwen3's template, it writes a thought, w40, only after the last question.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<' + m.role + '> ' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ 'w40 ' }}{% endif %}"
    "{{ m.content + (' <eos> ' if m.role == 'assistant' else ' ') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def test_an_answer_that_the_template_changes_later_is_only_context(caplog):
    first = example({"messages": say("w0", "w1")}, THINKING)
    assert first == ([USER, 3, ASSISTANT, 43, 4, EOS], [_, _, _, 43, 4, EOS])
    ids, labels = example({"messages": say("w0", "w1", "w2", "w3")}, THINKING)
    assert ids == [USER, 3, ASSISTANT, 4, EOS, USER, 5, ASSISTANT, 43, 6, EOS]
    assert labels == [_] * 8 + [43, 6, EOS]
    encoded = encode_prompt(make_chat_tokenizer(THINKING), say("w0", "w1", "w2"))
    assert ids[: len(encoded)] == encoded
    assert "SFT learns only the last answer" in caplog.text


def test_a_template_that_renders_the_last_prompt_differently_later_is_refused():
    with pytest.raises(RowError, match="differently in the whole conversation"):
        example({"messages": say("w0", "w1", "w2", "w3")}, FORGETFUL)


# No token predicts the first, so a text of one token has none to learn.
@pytest.mark.parametrize("row", [{"prompt": "w0", "completion": ""}, {"text": ""}, {"text": "w0"}])
def test_a_row_without_a_token_to_learn_is_refused(row):
    with pytest.raises(RowError, match="without a token to learn"):
        example(row, end_of_text=False)


def test_examples_are_padded_on_the_right_and_padding_does_not_count():
    rows = [{"input_ids": [5, 6, 7], "labels": [_, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = collate_examples(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["labels"].tolist() == [[_, 6, 7], [8, _, _]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
