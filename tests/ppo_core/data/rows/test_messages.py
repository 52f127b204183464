"""Messages of ShareGPT's form and of content parts give the rows of plain messages."""

import json
from typing import Any

import pytest

from ppo_core.data.rows.row_error import RowError
from ppo_core.data.rows.row_formats import find_row_format
from tests.helpers.inputs.rows import read_row

Message = dict[str, Any]


def plain(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": text} for role, text in turns]


def share_gpt(*turns: tuple[str, str]) -> list[Message]:
    speakers = {"user": "human", "assistant": "gpt"}
    return [{"from": speakers.get(role, role), "value": text} for role, text in turns]


def parts(*turns: tuple[str, str]) -> list[Message]:
    """Each text in two parts; one has the empty columns of a Parquet file."""
    return [
        {
            "role": role,
            "content": [
                {"type": "text", "text": text[:1]},
                {"type": "text", "text": text[1:], "image_url": None},
            ],
        }
        for role, text in turns
    ]


def own_names(*turns: tuple[str, str]) -> list[Message]:
    return [{"from": role, "value": text, "weight": 1} for role, text in turns]


def of_arrow(*turns: tuple[str, str]) -> list[Message]:
    return [{**message, "role": None, "content": None} for message in share_gpt(*turns)]


def roles_of_share_gpt(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": turn["from"], "content": turn["value"]} for turn in share_gpt(*turns)]


FORMS = {
    "messages": ("messages", plain),
    "ShareGPT": ("conversations", share_gpt),
    "ShareGPT with names of roles": ("conversations", own_names),
    "ShareGPT from a Parquet file": ("conversations", of_arrow),
    "ShareGPT in messages": ("messages", share_gpt),
    "messages in conversations": ("conversations", plain),
    "ShareGPT's names as roles": ("messages", roles_of_share_gpt),
    "parts": ("messages", parts),
    "parts in conversations": ("conversations", parts),
}
"""Column of a conversation, and the form of its messages."""

SYSTEM, ASKED, ANSWER = ("system", "be kind"), ("user", "how?"), ("assistant", "so")
MORE = [("user", "why?"), ("assistant", "because")]


@pytest.mark.parametrize(("column", "form"), FORMS.values(), ids=FORMS)
def test_a_conversation_of_any_form_is_a_demonstration_and_a_prompt(column, form):
    talk = [SYSTEM, ASKED, ANSWER, *MORE]
    row = {column: form(*talk)}
    assert read_row("demonstrations", row, is_chat=True) == {"messages": plain(*talk)}
    asked = read_row("prompts", row, is_chat=True)
    assert asked == {"prompt": plain(*talk[:-1]), "reference": "because"}
    unanswered = read_row("prompts", {column: form(SYSTEM, ASKED)}, is_chat=True)
    assert unanswered == {"prompt": plain(SYSTEM, ASKED), "reference": None}
    assert find_row_format("prompts", [column], is_chat=True).reading["prompt"] == column


@pytest.mark.parametrize(("column", "form"), FORMS.values(), ids=FORMS)
def test_preferences_of_any_form_are_pairs(column, form):
    (chosen,), (rejected,) = form(ANSWER), form(("assistant", "no"))
    whole = [form(SYSTEM, ASKED, answer) for answer in (ANSWER, ("assistant", "no"))]
    rows = {
        "one message": {column: form(SYSTEM, ASKED), "chosen": chosen, "rejected": rejected},
        "lists of one": {column: form(SYSTEM, ASKED), "chosen": [chosen], "rejected": [rejected]},
        "with the answer": {
            column: form(SYSTEM, ASKED, ANSWER),
            "chosen": [chosen],
            "rejected": [rejected],
        },
        "prompt apart": {"prompt": form(SYSTEM, ASKED), "chosen": chosen, "rejected": rejected},
        "whole conversations": {"chosen": whole[0], "rejected": whole[1]},
        "texts": {column: form(SYSTEM, ASKED), "chosen": "so", "rejected": "no"},
    }
    for name, row in rows.items():
        read = read_row("pairs", row, is_chat=True)
        assert read["prompt"] == plain(SYSTEM, ASKED), name
        assert (read["chosen"], read["rejected"]) == ("so", "no"), name
        asked = read_row("prompts", row, is_chat=True)
        assert asked == {"prompt": plain(SYSTEM, ASKED), "reference": "so"}, name


@pytest.mark.parametrize(("column", "form"), FORMS.values(), ids=FORMS)
def test_prompts_and_completions_of_any_form_are_read(column, form):
    row = {"prompt": form(ASKED), "completion": form(ANSWER)}
    read = read_row("demonstrations", row, is_chat=True)
    assert read == {"prompt": plain(ASKED), "completion": "so"}
    assert read_row("prompts", row, is_chat=True)["reference"] == "so"
    vote = {"prompt": form(ASKED), "first": form(ANSWER)[0], "second": "no", "label": "tie"}
    assert read_row("votes", vote, is_chat=True)["first"] == "so"


@pytest.mark.parametrize(("column", "form"), FORMS.values(), ids=FORMS)
def test_a_policy_that_reads_text_refuses_a_conversation_of_any_form(column, form):
    row = {column: form(ASKED, ANSWER)}
    for kind in ("prompts", "demonstrations"):
        with pytest.raises(RowError, match="with messages, but the policy reads text"):
            read_row(kind, row)


@pytest.mark.parametrize("kind", ["demonstrations", "prompts"])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"reasoning_content": "hm"}, "that has reasoning_content, but only role and content"),
        ({"weight": 0}, "of weight 0, but all answers are trained"),
    ],
)
def test_a_key_that_changes_the_meaning_of_a_message_is_refused(kind, more, message):
    answer = plain(ANSWER)[0]
    assert read_row(kind, {"messages": [*plain(ASKED), answer | dict.fromkeys(more)]}, is_chat=True)
    with pytest.raises(RowError, match=message):
        read_row(kind, {"messages": [*plain(ASKED), answer | more]}, is_chat=True)


@pytest.mark.parametrize("column", ["prompt", "messages"])
@pytest.mark.parametrize("form", [plain, share_gpt])
def test_messages_as_a_json_text_are_no_text(column, form):
    row = {column: json.dumps(form(ASKED))}
    with pytest.raises(RowError, match="with messages written as a JSON text"):
        read_row("prompts", row, is_chat=True)
    texts = ["[1]", '[{"content"', '[{"content": 1}]', '"content"']
    for text in texts:
        read = read_row("prompts", {"prompt": text}, is_chat=True)
        assert read["prompt"] == plain(("user", text))


def test_a_response_beside_a_conversation_without_an_answer_is_its_answer():
    row = {"messages": plain(ASKED, ANSWER, MORE[0]), "response": "because"}
    read = read_row("demonstrations", row, is_chat=True)
    assert read == {"messages": plain(ASKED, ANSWER, *MORE)}
    assert read_row("prompts", row, is_chat=True)["reference"] == "because"
    answered = {"messages": plain(ASKED, ANSWER), "response": "other"}
    assert read_row("demonstrations", answered, is_chat=True) == {"messages": plain(ASKED, ANSWER)}


def test_a_completion_of_messages_answers_a_prompt_of_text():
    row = {"prompt": "how?", "completion": share_gpt(ANSWER)}
    assert read_row("demonstrations", row) == {"prompt": "how?", "completion": "so"}
    row = {"prompt": "how?", "response": parts(ANSWER)}
    assert read_row("demonstrations", row) == {"prompt": "how?", "completion": "so"}
