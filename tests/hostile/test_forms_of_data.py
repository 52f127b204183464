"""Rows of a known form with broken values are refused, each with its reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from ppo_core.data.rows.read_rows import read_rows
from ppo_core.errors import DataError


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def said(speaker: Any, text: Any) -> dict[str, Any]:
    return {"from": speaker, "value": text}


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


SPEAKER = "not from any of human, user, gpt, assistant, system"

CONVERSATIONS: dict[str, tuple[Any, str]] = {
    "unknown speaker": ([said("tool", "a")], SPEAKER),
    "speaker in capitals": ([said("Human", "a")], SPEAKER),
    "speaker of a number": ([said(7, "a")], SPEAKER),
    "speaker of a list": ([said(["human"], "a")], SPEAKER),
    "speaker of nothing": ([said(None, "a")], SPEAKER),
    "value of a number": ([said("human", 7)], "role or content is not text"),
    "value of nothing": ([said("human", None)], "role or content is not text"),
    "value of a mapping": ([said("human", {"a": "b"})], "role or content is not text"),
    "no value": ([{"from": "human"}], "role or content is not text"),
    "no speaker": ([{"value": "a"}], "role or content is not text"),
    "no message": ([], "messages"),
    "texts": (["a", "b"], "messages"),
    "nothing": (None, "messages"),
    "an image": (user([{"type": "image", "image": "file:///etc/passwd"}]), "of type image,"),
    "an address": (
        user([{"type": "image_url", "image_url": {"url": "http://169.254.169.254"}}]),
        "of type image_url,",
    ),
    "text and audio": (
        user([{"type": "text", "text": "a"}, {"type": "input_audio"}]),
        "of type input_audio,",
    ),
    "a video of ShareGPT": ([said("human", [{"type": "video"}])], "of type video,"),
    "a part of another type": (user([{"type": "\x1b[2J", "text": "a"}]), "a part that is not text"),
    "a type of a list": (user([{"type": ["text"], "text": "a"}]), "a part that is not text"),
    "a part without a type": (user([{"text": "a"}]), "a part that is not text"),
    "a text of a number": (user([{"type": "text", "text": 7}]), "a part that is not text"),
    "a text of nothing": (user([{"type": "text", "text": None}]), "a part that is not text"),
    "a part of text": (user(["a"]), "a part that is not text"),
    "nested parts": (user([[{"type": "text", "text": "a"}]]), "a part that is not text"),
    "no parts": (user([]), "a list without parts"),
    "a call of a tool": (
        [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}],
        "that has tool_calls",
    ),
    "a call of a function": (
        [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}],
        "that has function_call",
    ),
    "an answer of a tool": (
        [{"role": "tool", "content": "a", "tool_call_id": "1"}],
        "that has tool_call_id",
    ),
}
"""Conversation, and what the message says."""


@pytest.mark.parametrize("kind", ["demonstrations", "prompts"])
@pytest.mark.parametrize("case", CONVERSATIONS)
def test_a_broken_conversation_is_refused(tmp_path: Path, kind: Any, case: str):
    value, says = CONVERSATIONS[case]
    rows = [{"conversations": value}]
    with pytest.raises(DataError, match=says) as found:
        read(tmp_path, rows, kind, is_chat=True)
    assert "\x1b" not in str(found.value)


NUMBERS = "a finite number for each response"

LISTS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer ranks": ({"responses": ["a", "b"], "ranks": [1]}, "as many numbers as there are"),
    "more scores": ({"responses": ["a", "b"], "scores": [1, 2, 3]}, "as many numbers as there"),
    "no ranks": ({"responses": ["a", "b"], "ranks": None}, "a list in ranks"),
    "ranks of a number": ({"responses": ["a", "b"], "ranks": 1}, "a list in ranks"),
    "scores of a mapping": ({"responses": ["a", "b"], "scores": {"a": 1}}, "a list in scores"),
    "a rank of text": ({"responses": ["a", "b"], "ranks": ["1", "2"]}, NUMBERS),
    "a rank of truth": ({"responses": ["a", "b"], "ranks": [True, False]}, NUMBERS),
    "a rank of nothing": ({"responses": ["a", "b"], "ranks": [1, None]}, NUMBERS),
    "a rank of 100 digits": ({"responses": ["a", "b"], "ranks": [1, 10**99]}, NUMBERS),
    "no responses": ({"responses": [], "ranks": []}, "at least two responses"),
    "one response": ({"responses": ["a"], "scores": [1]}, "at least two responses"),
    "responses of text": ({"responses": "ab", "scores": [1, 2]}, "at least two responses"),
    "responses of nothing": ({"responses": None, "scores": [1, 2]}, "at least two responses"),
    "a response of a number": ({"responses": ["a", 7], "scores": [1, 2]}, "text or one message"),
    "a response of nothing": ({"responses": ["a", None], "scores": [1, 2]}, "text or one message"),
    "a response of the user": (
        {"responses": ["a", user("b")[0]], "scores": [1, 2]},
        "does not end in an answer",
    ),
    "a response of media": (
        {
            "responses": ["a", {"role": "assistant", "content": [{"type": "image"}]}],
            "ranks": [1, 2],
        },
        "of type image,",
    ),
    "no scores at all": ({"completions": ["a", "b"]}, NUMBERS),
    "one overall_score": (
        {"completions": [{"response": "a", "overall_score": 1}, {"response": "b"}]},
        NUMBERS,
    ),
    "an overall_score of text": (
        {"completions": [{"response": one, "overall_score": "N/A"} for one in "ab"]},
        NUMBERS,
    ),
    "no response beside a score": (
        {"completions": [{"overall_score": 1}, {"overall_score": 2}]},
        "text or one message",
    ),
    "no prompt": ({"prompt": None, "responses": ["a", "b"], "ranks": [1, 2]}, "in the prompt"),
    "an empty prompt": ({"prompt": " ", "responses": ["a", "b"], "ranks": [1, 2]}, "empty prompt"),
    "a label of nobody": (
        {"responses": ["a", "b"], "ranks": [1, 2], "annotator": ["x"]},
        "in annotator",
    ),
}
"""Ranked list, and what the message says."""


@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("case", LISTS)
def test_a_broken_ranked_list_is_refused(tmp_path: Path, case: str, is_chat: bool):
    row, says = LISTS[case]
    with pytest.raises(DataError, match=says):
        read(tmp_path, [{"prompt": "q", **row}], "pairs", is_chat=is_chat)


@pytest.mark.parametrize("column", ["ranks", "scores"])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_rank_that_is_not_finite_is_refused(tmp_path: Path, column: str, number: str):
    row = {"prompt": "q", "responses": ["a", "b"], column: [1.0, float(number)]}
    Dataset.from_list([row]).to_parquet(tmp_path / "rows.pq")
    with pytest.raises(DataError, match=NUMBERS):
        read_rows(str(tmp_path / "rows.pq"), "pairs")


LABEL = "true or false in label"

JUDGEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "label of a number": ({"label": 1}, LABEL),
    "label of text": ({"label": "good"}, LABEL),
    "label of nothing": ({"label": None}, LABEL),
    "empty label": ({"label": ""}, LABEL),
    "label of a list": ({"label": [True]}, LABEL),
    "completion of a number": ({"completion": 7}, "in completion"),
    "completion of nothing": ({"completion": None}, "in completion"),
    "completion of the user": ({"completion": user("a")}, "does not end in an answer"),
    "completion of two messages": ({"completion": user("a") * 2}, "in completion"),
    "completion of media": (
        {"completion": [{"role": "assistant", "content": [{"type": "audio"}]}]},
        "of type audio,",
    ),
    "prompt of a number": ({"prompt": 7}, "in the prompt"),
    "empty prompt": ({"prompt": ""}, "empty prompt"),
    "source of a number": ({"source": 7}, "in source"),
    "alone": ({}, "whose prompt has no rejected completion"),
}
"""What is wrong with a judgement, and what the message says."""


@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("case", JUDGEMENTS)
def test_a_broken_judgement_is_refused(tmp_path: Path, case: str, is_chat: bool):
    changes, says = JUDGEMENTS[case]
    row = {"prompt": "q", "completion": "a", "label": True, **changes}
    with pytest.raises(DataError, match=says):
        read(tmp_path, [row], "pairs", is_chat=is_chat)


@pytest.mark.parametrize("case", ["unknown speaker", "an image", "no parts"])
def test_one_broken_row_of_a_hundred_is_left_out_and_counted(tmp_path: Path, case: str):
    value, says = CONVERSATIONS[case]
    rows = [{"conversations": [said("human", f"q{n}"), said("gpt", "a")]} for n in range(99)]
    found = read(tmp_path, [*rows, {"conversations": value}], "prompts", is_chat=True)
    assert len(found) == 99
    ((reason, count),) = found.left_out.items()
    assert says in reason and count == 1


def read(folder: Path, rows: list[Any], kind: Any, *, is_chat: bool) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_rows(str(folder / "rows.jsonl"), kind, is_chat=is_chat)
