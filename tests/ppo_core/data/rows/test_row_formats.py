"""Every form of rows that people have gives the same rows."""

from typing import Any

import pytest

from ppo_core.config.row_settings import FIELDS, LABEL_FIELDS, ReadOptions, parse_columns
from ppo_core.data.rows.read_rows import read_source
from ppo_core.data.rows.row_error import RowError
from ppo_core.data.rows.row_formats import find_row_format
from ppo_core.data.sources.source import source_of_rows
from ppo_core.errors import DataError
from tests.helpers.inputs.rows import read_row, rows_of


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "s"}
HH = "\n\nHuman: q\n\nAssistant:"
TLDR = {"subreddit": "cats", "title": "t", "post": "p", "id": 1}
TLDR_PROMPT = "SUBREDDIT: r/cats\n\nTITLE: t\n\nPOST: p\n\nTL;DR:"

PROMPTS: dict[str, tuple[dict[str, Any], str, list[dict[str, str]]]] = {
    "prompt": ({"prompt": "q"}, "q", [user("q")]),
    "query": ({"query": "q"}, "q", [user("q")]),
    "question": ({"question": "q", "id": 7}, "q", [user("q")]),
    "instruction": ({"instruction": "q", "input": ""}, "q", [user("q")]),
    "instruction and input": ({"instruction": "q", "input": "i"}, "q\n\ni", [user("q\n\ni")]),
    "TL;DR": ({"info": TLDR}, TLDR_PROMPT, [user(TLDR_PROMPT)]),
    "HH prompt": ({"prompt": HH}, HH, [user("q")]),
    "HH pair": ({"chosen": HH + " a", "rejected": HH + " b"}, HH, [user("q")]),
}


@pytest.mark.parametrize(("row", "text", "messages"), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_of_any_form_is_text_or_messages(row, text, messages):
    assert read_row("prompts", row)["prompt"] == text
    assert read_row("prompts", row, is_chat=True)["prompt"] == messages


CHATS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "prompt": ({"prompt": [SYSTEM, user("q")]}, [SYSTEM, user("q")]),
    "with other keys": ({"prompt": [{**user("q"), "name": None}]}, [user("q")]),
    "messages": ({"messages": [user("q")]}, [user("q")]),
    "messages with an answer": ({"messages": [user("q"), assistant("a")]}, [user("q")]),
    "pairs of conversations": (
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        [user("q")],
    ),
    "turns of HH": (
        {"prompt": "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nHuman: s\n\nAssistant:"},
        [user("q"), assistant("a"), user("r\n\ns")],
    ),
}


@pytest.mark.parametrize(("row", "messages"), CHATS.values(), ids=CHATS)
def test_messages_of_any_form_are_a_chat(row, messages):
    assert read_row("prompts", row, is_chat=True)["prompt"] == messages


REFERENCES = [
    {"prompt": "q", "reference": "a"},
    {"prompt": "q", "completion": "a"},
    {"question": "q", "answer": "a"},
    {"query": "q", "reference_response": "a"},
    {"instruction": "q", "input": "", "output": "a"},
    {"prompt": "q", "response": [assistant("a")]},
    {"prompt": "q", "reference": "a", "completion": "b"},
]


@pytest.mark.parametrize("row", REFERENCES)
def test_a_reference_of_any_form_is_text(row):
    assert read_row("prompts", row) == {"prompt": "q", "reference": "a"}
    if "reference" not in row:
        assert read_row("demonstrations", row) == {"prompt": "q", "completion": "a"}


def test_the_reference_of_messages_is_their_last_answer():
    row = {"messages": [user("q"), assistant("a")]}
    assert read_row("prompts", row, is_chat=True)["reference"] == "a"
    assert read_row("prompts", {"messages": [user("q")]}, is_chat=True)["reference"] is None
    # A column of references wins, but a row may have no value in it.
    for value, reference in (("b", "b"), (None, "a")):
        named = read_row("prompts", {**row, "reference": value}, is_chat=True)
        assert named == {"prompt": [user("q")], "reference": reference}


PREFERENCES = {
    "ultrafeedback": {
        "prompt": "q",
        "chosen": [user("q"), assistant("a")],
        "rejected": [user("q"), assistant("b")],
        "messages": [user("q"), assistant("a")],
    },
    "conversations": {
        "chosen": [user("q"), assistant("a")],
        "rejected": [user("q"), assistant("b")],
    },
    "hh": {
        "chosen": "\n\nHuman: q\n\nAssistant: a",
        "rejected": "\n\nHuman: q\n\nAssistant: b",
    },
    "texts": {"prompt": "q", "chosen": "a", "rejected": "b"},
}


@pytest.mark.parametrize("row", PREFERENCES.values(), ids=PREFERENCES)
def test_the_reference_of_preferences_is_the_preferred_answer(row):
    asked = {"prompt": [user("q")], "reference": "a"}
    assert read_row("prompts", row, is_chat=True) == asked
    assert find_row_format("prompts", set(row), is_chat=True).reading["reference"] == "chosen"
    # A column of references is not replaced.
    named = read_row("prompts", {**row, "reference": "c"}, is_chat=True)
    assert named["reference"] == "c"


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("q", [user("q"), assistant("a"), user("r")]),
        ("q", [SYSTEM, user("q")]),
        ([SYSTEM], [user("q")]),
    ],
)
def test_a_pair_has_the_same_prompt_in_every_use(prompt, before):
    row = {
        "prompt": prompt,
        "chosen": [*before, assistant("b")],
        "rejected": [*before, assistant("c")],
    }
    asked = read_row("pairs", row, is_chat=True)["prompt"]
    assert asked[-len(before) :] == before
    assert read_row("prompts", row, is_chat=True) == {"prompt": asked, "reference": "b"}


PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "messages and texts": {"prompt": [user("q")], "chosen": "a", "rejected": "b"},
    "prompt apart": {
        "prompt": [user("q")],
        "chosen": [assistant("a")],
        "rejected": [assistant("b")],
    },
    "prompt inside": {
        "chosen": [user("q"), assistant("a")],
        "rejected": [user("q"), assistant("b")],
    },
    "UltraFeedback": {
        "prompt": "q",
        "prompt_id": "1",
        "chosen": [user("q"), assistant("a")],
        "rejected": [user("q"), assistant("b")],
        "messages": [user("q"), assistant("a")],
        "score_chosen": 9.0,
        "score_rejected": 2.0,
    },
    "HH": {"chosen": HH + " a", "rejected": HH + " b"},
    "TL;DR": {
        "info": {**TLDR},
        "summaries": [{"text": "b", "policy": "x"}, {"text": "a", "policy": "y"}],
        "choice": 1,
        "worker": "w",
    },
}


@pytest.mark.parametrize("form", PAIRS)
def test_preferences_of_any_form_are_a_prompt_and_two_answers(form):
    row = read_row("pairs", PAIRS[form], is_chat=True)
    asked = TLDR_PROMPT if form == "TL;DR" else "q"
    assert row["prompt"] == [user(asked)]
    assert (row["chosen"], row["rejected"]) == ("a", "b")
    assert row["annotator"] == ("w" if form == "TL;DR" else None)


def test_a_prompt_inside_of_both_answers_is_taken_out():
    row = {"prompt": "q: ", "chosen": "q: a", "rejected": "q: b"}
    read = read_row("pairs", row)
    assert (read["prompt"], read["chosen"], read["rejected"]) == ("q: ", "a", "b")
    read = read_row("pairs", {"prompt": HH, "chosen": HH + " a", "rejected": HH + " b"})
    assert (read["prompt"], read["chosen"], read["rejected"]) == (HH, " a", " b")
    read = read_row("pairs", {"prompt": HH, "chosen": " a", "rejected": " b"}, is_chat=True)
    assert (read["prompt"], read["chosen"]) == ([user("q")], "a")


@pytest.mark.parametrize("kind", ["pairs", "prompts"])
def test_answers_that_begin_like_their_prompt_by_chance_stay_whole(kind):
    greeting = {"question": "Hello!", "chosen": "Hello! How are you?", "rejected": "Hello! Bye."}
    other = {"question": "2 + 2?", "chosen": "4", "rejected": "5"}
    repeated = {"question": "2 + 2? ", "chosen": "2 + 2? 4", "rejected": "2 + 2? 5"}
    field = "chosen" if kind == "pairs" else "reference"

    def read(*rows: dict[str, Any]) -> list[str]:
        return [row[field] for row in rows_of(kind, rows)]

    assert read(greeting, other) == ["Hello! How are you?", "4"]
    # A conversation of HH is never repeated by chance.
    hh = {"question": HH, "chosen": HH + " a", "rejected": HH + " b"}
    assert read(other, other, hh) == ["4", "4", " a"]
    assert read(greeting, repeated, repeated) == [" How are you?", "4", "4"]
    asked = [{"asked" if name == "question" else name: text for name, text in repeated.items()}]
    renamed = ReadOptions({"prompt": "asked"})
    found = read_source(source_of_rows(asked), kind, is_chat=False, options=renamed)
    assert found.column(field) == ["4"]


def test_messages_beside_two_texts_are_their_prompt():
    row = {"messages": [user("q"), assistant("a")], "chosen": "a", "rejected": "b"}
    assert read_row("pairs", row, is_chat=True)["prompt"] == [user("q")]
    with pytest.raises(RowError, match="with messages, but the policy reads text"):
        read_row("pairs", row)


def test_a_prompt_that_ends_in_the_common_messages_is_the_prompt():
    row = {
        "prompt": [SYSTEM, user("q")],
        "chosen": [user("q"), assistant("a")],
        "rejected": [user("q"), assistant("b")],
    }
    assert read_row("pairs", row, is_chat=True)["prompt"] == [SYSTEM, user("q")]


def test_a_value_that_is_no_reference_is_none():
    row = {"prompt": "2 + 2?", "answer": 4, "response": None}
    assert read_row("prompts", row) == {"prompt": "2 + 2?", "reference": None}


@pytest.mark.parametrize("blank", ["", " ", "\n\t"])
def test_a_blank_text_is_no_reference(blank: str):
    assert read_row("prompts", {"prompt": "q", "reference": blank})["reference"] is None
    spare = {"prompt": "q", "reference": blank, "completion": "a"}
    assert read_row("prompts", spare)["reference"] == "a"
    pair = {"prompt": "q", "chosen": blank, "rejected": "a"}
    assert read_row("prompts", pair)["reference"] is None
    messages = {"messages": [user("q"), assistant(blank)]}
    assert read_row("prompts", messages, is_chat=True)["reference"] is None


def test_a_column_that_begins_late_is_read():
    form = find_row_format("demonstrations", ["instruction", "output"], is_chat=False)
    late = {"instruction": "q", "input": "i", "output": "a"}
    assert form.convert(late)["prompt"] == "q\n\ni"


def test_preferences_as_text_keep_every_character():
    assert read_row("pairs", PAIRS["HH"])["prompt"] == HH
    assert read_row("pairs", PAIRS["HH"])["chosen"] == " a"
    assert read_row("pairs", {"chosen": "a", "rejected": "b"})["prompt"] == ""


def test_a_system_message_before_the_conversations_is_kept():
    row = {
        "prompt": [SYSTEM],
        "chosen": [user("q"), assistant("a")],
        "rejected": [user("q"), assistant("b")],
    }
    assert read_row("pairs", row, is_chat=True)["prompt"] == [SYSTEM, user("q")]


LABELS = [
    ({"margin": 2}, {"margin": 2.0}),
    ({"margin": "1.5", "tie": "False", "source": "web"}, {"margin": 1.5, "tie": False}),
    ({"margin": "", "tie": ""}, {"margin": None, "tie": None}),
    ({"annotator": 7}, {"annotator": "7"}),
    ({"annotator": "", "category": "", "source": ""}, dict.fromkeys(LABEL_FIELDS[2:])),
    ({"tie": True, "category": "c"}, {"tie": True, "category": "c"}),
]


@pytest.mark.parametrize(("labels", "read"), LABELS)
def test_labels_are_read_from_json_and_from_csv(labels, read):
    row = read_row("pairs", {"chosen": "a", "rejected": "b", **labels})
    assert {name: row[name] for name in read} == read


@pytest.mark.parametrize(
    ("people", "annotator"),
    [({"worker": "w"}, "w"), ({"annotator": "a"}, "a"), ({"worker": "w", "annotator": "a"}, "a")],
)
def test_a_comparison_of_tldr_names_its_worker_or_its_annotator(people, annotator):
    row = {"info": TLDR, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 0, **people}
    form = find_row_format("pairs", list(row), is_chat=False)
    assert form.convert(row)["annotator"] == row[form.reading["annotator"]] == annotator


def test_an_empty_text_beside_a_response_of_feedback_is_a_missing_response():
    row = {"prompt": "q", "chosen": "a", "rejected": ""}
    assert read_row("feedback", row)["rejected"] is None
    assert read_row("feedback", {"prompt": "q", "chosen": "", "rejected": "b"})["chosen"] is None
    # A judgment of an empty answer stays one.
    row = {"prompt": "q", "completion": "", "label": False}
    assert read_row("feedback", row)["rejected"] == ""


def test_conversations_and_texts_are_demonstrations():
    messages = [SYSTEM, user("q"), assistant("a"), user("r"), assistant("b")]
    row = {"messages": [{**turn, "name": "n"} for turn in messages]}
    assert read_row("demonstrations", row, is_chat=True) == {"messages": messages}
    assert read_row("demonstrations", {"text": "t"}) == {"text": "t"}
    row = {"prompt": [user("q")], "completion": [assistant("a")]}
    assert read_row("demonstrations", row, is_chat=True) == {
        "prompt": [user("q")],
        "completion": "a",
    }


def test_votes_have_two_answers_and_a_label():
    row = {"question": "q", "first": "a", "second": "b", "label": "tie"}
    assert read_row("votes", row) == {"prompt": "q", "first": "a", "second": "b", "label": "tie"}
    assert read_row("votes", row | {"annotator": 7})["annotator"] == "7"
    assert read_row("votes", row | {"annotator": None})["annotator"] is None


def test_a_column_of_another_name_is_read_where_it_exists():
    renamed = {"prompt": "post", "chosen": "better"}
    row = {"post": "q", "prompt": "other", "better": "a", "rejected": "b"}
    form = find_row_format("pairs", list(row), is_chat=False, renamed=renamed)
    read = form.convert(row)
    assert (read["prompt"], read["chosen"], read["rejected"]) == ("q", "a", "b")
    assert form.reading == {"prompt": "post", "chosen": "better", "rejected": "rejected"}
    form = find_row_format("prompts", ["prompt"], is_chat=False, renamed=renamed)
    assert form.convert({"prompt": "other"})["prompt"] == "other"


def test_token_ids_are_prompts_without_their_padding():
    row = {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1], "prompt": "q"}
    form = find_row_format("prompts", list(row), is_chat=True, takes_token_ids=True)
    assert form.convert(row) == {"prompt": [5, 6]}
    with pytest.raises(RowError, match="without token ids in input_ids"):
        form.convert({"input_ids": [2**64]})
    assert find_row_format("prompts", list(row), is_chat=False).convert(row)["prompt"] == "q"


BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "empty prompt": ("prompts", {"prompt": " \n"}, "with an empty prompt"),
    "no prompt": ("prompts", {"prompt": None}, "without a text or messages in the prompt"),
    "number": ("prompts", {"prompt": 7}, "without a text or messages in the prompt"),
    "instruction of a number": (
        "prompts",
        {"instruction": 7, "input": "i"},
        "two texts in instruction and input",
    ),
    "instruction of nothing": ("prompts", {"instruction": 7, "input": ""}, "in the prompt"),
    "content of parts": (
        "prompts",
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
        "a part of type image, but only text is read",
    ),
    "prompt of an answer": (
        "prompts",
        {"prompt": [user("q"), assistant("a")]},
        "ends in an answer of the assistant",
    ),
    "choice of a fraction": (
        "pairs",
        {"info": TLDR, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 1.0},
        "two summaries and a choice",
    ),
    "HH that ends in a question": (
        "pairs",
        {"chosen": HH + " a\n\nHuman: thanks", "rejected": HH + " b"},
        "does not end in an answer",
    ),
    "another prompt beside conversations": (
        "pairs",
        {
            "prompt": "p",
            "chosen": [user("q"), assistant("a")],
            "rejected": [user("q"), assistant("b")],
        },
        "not the start of the conversations",
    ),
    "HH of an answer": (
        "prompts",
        {"prompt": "\n\nHuman: q\n\nAssistant: a"},
        "does not end in a turn of the human",
    ),
    "other prompts": (
        "pairs",
        {"chosen": [user("q"), assistant("a")], "rejected": [user("r"), assistant("b")]},
        "differ before the last message",
    ),
    "other turns of HH": (
        "pairs",
        {"chosen": HH + " a", "rejected": HH.replace("q", "r") + " b"},
        "differ before the last answer",
    ),
    "no answer": (
        "pairs",
        {"chosen": [user("q")], "rejected": [user("q")]},
        "does not end in an answer",
    ),
    "text and messages": (
        "pairs",
        {"prompt": "q", "chosen": "a", "rejected": [assistant("b")]},
        "two texts or two lists",
    ),
    "texts without a prompt": ("pairs", {"chosen": "a", "rejected": "b"}, "which a chat needs"),
    "no summaries": (
        "pairs",
        {"info": TLDR, "summaries": [], "choice": 0},
        "two summaries and a choice",
    ),
    "no post": (
        "pairs",
        {"info": {"article": "x"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 0},
        "without a post",
    ),
    "margin": (
        "pairs",
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")},
        "finite number in margin",
    ),
    "margin of truth": (
        "pairs",
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": True},
        "finite number in margin",
    ),
    "tie": ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "tie": 1}, "in tie"),
    "annotator": (
        "pairs",
        {"prompt": "q", "chosen": "a", "rejected": "b", "annotator": ["x"]},
        "in annotator",
    ),
    "ranks of None": (
        "pairs",
        {"prompt": "q", "responses": ["a", "b"], "ranks": None},
        "without a list in ranks",
    ),
    "conversation from an answer on": (
        "demonstrations",
        {"messages": [assistant("a"), user("q"), assistant("b")]},
        "that begins with an answer of the assistant",
    ),
    "conversation of one": ("demonstrations", {"messages": [user("q")]}, "without an answer"),
    "messages as text": ("demonstrations", {"messages": "q"}, "without messages"),
    "completion": ("demonstrations", {"prompt": "q", "completion": 5}, "in completion"),
}


@pytest.mark.parametrize(("kind", "row", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_row_that_cannot_be_used_says_why(kind, row, reason):
    with pytest.raises(RowError, match=reason):
        read_row(kind, row, is_chat=True)


def test_messages_need_a_chat():
    with pytest.raises(RowError, match="with messages, but the policy reads text"):
        read_row("prompts", {"prompt": [user("q")]})


MISSING = [
    ("prompts", ["text", "label"], "no column prompt .*query.*the columns are label, text"),
    ("pairs", ["prompt", "chosen"], "no column rejected; the columns are chosen, prompt"),
    ("pairs", ["a"], "no column chosen, rejected"),
    ("demonstrations", ["prompt", "reply"], "no column completion .*output"),
    ("demonstrations", ["a"], "no column prompt, completion"),
    ("votes", ["prompt", "first"], "no column second, label"),
    (
        "pairs",
        ["prompt", "choosen", "rejected"],
        r"choosen, prompt, rejected\. Did you mean choosen\? Rename a column, or give its name in "
        r"the setting columns: --set columns\.chosen=choosen for a run of the flow, --columns "
        r"chosen=choosen for other commands\.$",
    ),
    (
        "pairs",
        ["prompt", "chosen text", "Rejected"],
        r"mean chosen text, Rejected\? .* --set 'columns\.chosen=chosen text' "
        r"--set columns\.rejected=Rejected for",
    ),
    (
        "demonstrations",
        ["conversation_id", "conversation", "turn"],
        r"Did you mean conversation\?.* --set columns\.messages=conversation for a run",
    ),
    ("pairs", ["prompt", "reference"], r"are prompt, reference\. Rename .* setting columns\.$"),
]


@pytest.mark.parametrize(("kind", "columns", "message"), MISSING)
def test_a_missing_column_is_named_with_the_columns_that_are_there(kind, columns, message):
    with pytest.raises(DataError, match=message):
        find_row_format(kind, columns, is_chat=False)


def test_all_columns_of_a_field_are_named_as_in_the_file():
    renamed = {"reference": "good, or best", "completion": "spare"}
    found = find_row_format(
        "prompts", ["input", "instruction", *renamed.values()], is_chat=False, renamed=renamed
    )
    assert found.reading == {"prompt": "instruction, input", "reference": "good, or best, spare"}


@pytest.mark.parametrize("kind", ["demonstrations", "prompts"])
def test_a_conversation_may_be_in_a_column_of_another_name(kind):
    """As in lmsys-chat-1m."""
    row = {"conversation_id": "7", "conversation": [user("q"), assistant("a")], "turn": 1}
    renamed = parse_columns(["messages=conversation"])
    found = find_row_format(kind, list(row), is_chat=True, renamed=renamed)
    assert (
        found.convert(row)
        == {
            "demonstrations": {"messages": row["conversation"]},
            "prompts": {"prompt": [user("q")], "reference": "a"},
        }[kind]
    )


def test_every_field_that_can_have_another_name_is_read():
    rows = [
        ("pairs", ["prompt", "chosen", "rejected", *LABEL_FIELDS]),
        ("pairs", ["prompt", "completion", "label"]),
        ("pairs", ["prompt", "responses", "ranks"]),
        ("pairs", ["prompt", "responses", "scores"]),
        ("prompts", ["prompt", "reference"]),
        ("demonstrations", ["prompt", "completion"]),
        ("demonstrations", ["messages"]),
        ("votes", ["prompt", "first", "second", "label"]),
    ]
    read = {
        field
        for kind, columns in rows
        for field in find_row_format(kind, columns, is_chat=False).reading
    }
    assert read == set(FIELDS)
