"""Chat messages rendered by the tokenizer's template, and the errors."""

from functools import partial

import pytest
from transformers import ByT5Tokenizer

from ppo_core.data.chat_template import (
    RejectedChatError,
    encode_chat,
    encode_with_mask,
    is_messages,
    render_chat,
    set_prompt_format,
)
from ppo_core.errors import ConfigError, DataError
from tests.helpers.models.chat import ASSISTANT, ENDED, OPEN, STRICT, USER, make_chat_tokenizer, say
from tests.helpers.models.chat_models import END_OF_TEXT, TEMPLATES, make_instruct_tokenizer
from tests.helpers.models.tiny import EOS


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


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %} {{ m.content }} "
    "{% endgeneration %}{% else %}<user> {{ m.content }}{% endif %}{% endfor %}"
)


def test_spaces_around_an_answer_that_belong_to_no_token_do_not_move_its_mask():
    ids, mask = encode_with_mask(make_chat_tokenizer(MARKED), say("w0", "w1", "w2", "w3"))
    assert (ids, mask) == ([USER, 3, 4, USER, 5, 6], [0, 0, 1, 0, 0, 1])


def test_a_mask_needs_a_tokenizer_that_locates_its_tokens():
    tokenizer = ByT5Tokenizer(chat_template=MARKED)
    with pytest.raises(ConfigError, match=r"generation.*ByT5Tokenizer cannot map tokens"):
        encode_with_mask(tokenizer, say("w0", "w1"))


def test_a_start_token_that_the_template_writes_is_not_put_there_twice():
    tokenizer = make_chat_tokenizer("<unk> {{ messages[0].content }}")
    tokenizer.bos_token = "<unk>"
    tokenizer.add_bos_token = True
    assert encode_chat(tokenizer, say("w0"), end=False) == [2, 3]


def test_a_template_that_writes_the_date_gives_the_same_text_on_every_day():
    template = "{{ strftime_now('%d %b %Y %H:%M:%S.%f') }} {{ messages[0].content }}"
    text = render_chat(make_chat_tokenizer(template), say("w0"), answer_follows=True)
    assert text == "26 Jul 2024 00:00:00.000000 w0"


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


NAMED_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "<{{ m.role }}> {{ m.content }} {% endif %}{% endfor %}"
)
"""Template that writes only the roles that it names, as Qwen2.5's template does."""


def test_a_message_whose_role_the_template_leaves_out_is_refused():
    turns = [{"role": "developer", "content": " w0 "}, *say("w1")]
    assert render_chat(make_instruct_tokenizer("llama-3"), turns, answer_follows=True)
    tokenizer = make_chat_tokenizer(NAMED_ROLES)
    for render in (partial(render_chat, answer_follows=True), encode_with_mask):
        with pytest.raises(RejectedChatError, match="leaves out messages with the role 'developer"):
            render(tokenizer, turns)
    turns[0]["role"] = "system"
    assert "w0" in render_chat(tokenizer, turns, answer_follows=True)


def test_a_tokenizer_without_an_end_token_cannot_end_a_conversation():
    tokenizer = make_chat_tokenizer(OPEN)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        encode_chat(tokenizer, say("w0"), end=True)


@pytest.mark.parametrize("prompt_format", ["auto", "chat"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_in_a_chat_the_end_of_a_turn_is_the_end_of_a_response(family, prompt_format, tmp_path):
    tokenizer = make_instruct_tokenizer(family)
    assert tokenizer.eos_token == END_OF_TEXT
    set_prompt_format(tokenizer, prompt_format)
    assert tokenizer.eos_token == TEMPLATES[family][2]
    assert tokenizer.pad_token == END_OF_TEXT
    tokenizer.save_pretrained(tmp_path)
    saved = type(tokenizer).from_pretrained(tmp_path)
    assert (saved.eos_token, saved.chat_template) == (TEMPLATES[family][2], tokenizer.chat_template)


def test_as_text_a_tokenizer_has_no_template_and_keeps_its_end_token():
    tokenizer = make_instruct_tokenizer("chatml")
    set_prompt_format(tokenizer, "text")
    assert (tokenizer.chat_template, tokenizer.eos_token) == (None, END_OF_TEXT)


WITHOUT_ANSWERS = "<unk> {% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [OPEN, STRICT, WITHOUT_ANSWERS])
def test_a_template_that_writes_no_end_keeps_the_end_of_text(template):
    tokenizer = make_chat_tokenizer(template)
    set_prompt_format(tokenizer, "auto")
    assert tokenizer.eos_token_id == EOS


@pytest.mark.parametrize("prompt_format", ["auto", "chat"])
def test_one_of_several_templates_must_be_the_default(prompt_format):
    tokenizer = make_chat_tokenizer({"tool_use": OPEN, "rag": OPEN})
    with pytest.raises(ConfigError, match=r"the chat templates rag, tool_use, and none .*default"):
        set_prompt_format(tokenizer, prompt_format)
    tokenizer.chat_template["default"] = OPEN
    set_prompt_format(tokenizer, prompt_format)
    assert tokenizer.eos_token_id == EOS


def test_a_chat_needs_a_template():
    tokenizer = make_chat_tokenizer(None)
    with pytest.raises(ConfigError, match=r"has no chat template\. Set its chat_template, or set"):
        set_prompt_format(tokenizer, "chat")
    set_prompt_format(tokenizer, "auto")
    assert tokenizer.eos_token_id == EOS
