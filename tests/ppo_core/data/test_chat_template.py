"""Chat messages rendered by the tokenizer's template, and the errors."""

import pytest

from ppo_core.data.chat_template import encode_chat, is_messages, render_chat
from ppo_core.errors import DataError
from tests.helpers.chat import ASSISTANT, ENDED, OPEN, STRICT, USER, make_chat_tokenizer, say
from tests.helpers.tiny import EOS


def test_only_a_list_of_mappings_is_a_conversation():
    assert is_messages(say("w0"))
    assert not any(map(is_messages, ("w0", [], [3, 4], ["w0"], {"role": "user"}, None)))


def test_the_assistants_turn_is_opened_where_an_answer_follows():
    tokenizer = make_chat_tokenizer()
    assert render_chat(tokenizer, say("w0"), answer_follows=False) == "<user> w0 "
    assert render_chat(tokenizer, say("w0"), answer_follows=True) == "<user> w0 <assistant> "


@pytest.mark.parametrize(("template", "in_template"), [(ENDED, [EOS]), (OPEN, [])])
def test_a_conversation_ends_with_one_end_token_whether_or_not_the_template_writes_it(
    template, in_template
):
    tokenizer = make_chat_tokenizer(template)
    ids = [USER, 3, ASSISTANT, 4]
    assert encode_chat(tokenizer, say("w0", "w1"), end=True) == [*ids, EOS]
    assert encode_chat(tokenizer, say("w0", "w1"), end=False) == [*ids, *in_template]


def test_a_start_token_that_the_template_writes_is_not_put_there_twice():
    tokenizer = make_chat_tokenizer("<unk> {{ messages[0].content }}")
    tokenizer.bos_token = "<unk>"
    tokenizer.add_bos_token = True
    assert encode_chat(tokenizer, say("w0"), end=False) == [2, 3]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, say("w0"), "has no chat template.*Set its chat_template"),
        (STRICT, say("w0", "w1"), "roles user, assistant: roles must alternate"),
        (ENDED, [{"role": "user"}], "must have the text fields 'role' and 'content'"),
        (ENDED, [{"role": "user", "content": 5}], "must have the text fields 'role' and 'content'"),
    ],
)
def test_what_cannot_become_text_is_refused_with_the_reason(template, messages, message):
    with pytest.raises(DataError, match=message):
        render_chat(make_chat_tokenizer(template), messages, answer_follows=True)


def test_a_tokenizer_without_an_end_token_cannot_end_a_conversation():
    tokenizer = make_chat_tokenizer(OPEN)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        encode_chat(tokenizer, say("w0"), end=True)
