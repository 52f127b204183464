"""Texts that are far larger than a model's context: refused by size, before they are tokenized."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data import segments
from ppo_core.data.prompt_set import make_prompt_set
from ppo_core.data.prompts import MIN_CHARACTERS, check_prompt_sizes
from ppo_core.data.rows.overlong import fit_pairs, fit_prompts
from ppo_core.data.rows.read_rows import Rows, read_rows
from ppo_core.errors import DataError
from ppo_core.supervised.examples.encoded_rows import encode_rows
from ppo_core.supervised.supervised_config import SupervisedConfig
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.tiny import make_policy, make_tokenizer

HUGE = "w1 " * 1_000_000
"""3 MB, of which a model with a context of 64 tokens reads at most 0.1 MB."""


@pytest.fixture(autouse=True)
def nothing_huge_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = segments._encode

    def checked(tokenizer: Any, texts: Any, **options: Any) -> Any:
        assert all(len(text) < 2 * MIN_CHARACTERS for text in texts)
        return encode(tokenizer, texts, **options)

    monkeypatch.setattr(segments, "_encode", checked)


def rows_of(tmp_path: Path, kind: Any, *rows: Mapping[str, Any], is_chat: bool = False) -> Rows:
    good = rows[-1]
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in (*rows, *[good] * 200)]
    file.write_text("\n".join(lines))
    return read_rows(str(file), kind, is_chat=is_chat)


def prompts(rows: Rows, overlong: Any, *, is_chat: bool) -> Rows:
    tokenizer = make_chat_tokenizer() if is_chat else make_tokenizer()
    return fit_prompts(rows, tokenizer, context=64, response_length=8, overlong=overlong)


def pairs(rows: Rows, overlong: Any, *, is_chat: bool) -> Rows:
    tokenizer = make_chat_tokenizer() if is_chat else make_tokenizer()
    return fit_pairs(rows, tokenizer, 64, overlong, end_of_text=True)


def pairs_to_train_on(rows: Rows, overlong: Any, *, is_chat: bool) -> Rows:
    tokenizer = make_chat_tokenizer() if is_chat else make_tokenizer()
    config = SupervisedConfig(max_length=64)
    return encode_rows("pairs", rows, tokenizer, config, limit=64, overlong=overlong)


def demonstrations(rows: Rows, overlong: Any, *, is_chat: bool) -> Rows:
    tokenizer = make_chat_tokenizer() if is_chat else make_tokenizer()
    config = SupervisedConfig(max_length=64)
    return encode_rows("demonstrations", rows, tokenizer, config, limit=64, overlong=overlong)


def say(*contents: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    return [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]


PAIR = {"prompt": "w1", "chosen": "w2", "rejected": "w3"}
ANSWER = {"prompt": "w1", "completion": "w2"}

CASES: dict[str, tuple[Callable[..., Rows], str, dict[str, Any], dict[str, Any], bool]] = {
    "a prompt": (prompts, "prompts", {"prompt": HUGE}, {"prompt": "w1"}, False),
    "a word": (prompts, "prompts", {"prompt": "w" * 3_000_000}, {"prompt": "w1"}, False),
    "spaces": (prompts, "prompts", {"prompt": "w1" + " " * 3_000_000}, {"prompt": "w1"}, False),
    "a message": (prompts, "prompts", {"prompt": say(HUGE)}, {"prompt": say("w1")}, True),
    "an early message": (
        prompts,
        "prompts",
        {"prompt": say(HUGE, "w1", "w2")},
        {"prompt": say("w1")},
        True,
    ),
    "many messages": (
        prompts,
        "prompts",
        {"prompt": say(*["w1 " * 50_000] * 21)},
        {"prompt": say("w1")},
        True,
    ),
    "a text for a chat": (prompts, "prompts", {"prompt": HUGE}, {"prompt": "w1"}, True),
    "a prompt of a pair": (pairs, "pairs", PAIR | {"prompt": HUGE}, PAIR, False),
    "a chosen response": (pairs, "pairs", PAIR | {"chosen": HUGE}, PAIR, False),
    "a rejected response": (pairs, "pairs", PAIR | {"rejected": HUGE}, PAIR, True),
    "a pair to train on": (pairs_to_train_on, "pairs", PAIR | {"chosen": HUGE}, PAIR, False),
    "a completion": (
        demonstrations, "demonstrations", ANSWER | {"completion": HUGE}, ANSWER, False
    ),
    "a prompt of a completion": (
        demonstrations, "demonstrations", ANSWER | {"prompt": HUGE}, ANSWER, False
    ),
    "a demonstration": (demonstrations, "demonstrations", {"text": HUGE}, {"text": "w1 w2"}, False),
    "a conversation": (
        demonstrations,
        "demonstrations",
        {"messages": say("w1", HUGE)},
        {"messages": say("w1", "w2")},
        True,
    ),
}  # fmt: skip

SHORTENED = {"a prompt", "an early message", "a prompt of a pair", "a prompt of a completion"}
"""Cases with a prompt that has an end that fits."""


@pytest.mark.parametrize("case", CASES)
def test_a_huge_text_is_left_out_and_counted(case: str, tmp_path: Path):
    fit, kind, huge, good, is_chat = CASES[case]
    rows = rows_of(tmp_path, kind, huge, good, is_chat=is_chat)
    fitting = fit(rows, "drop", is_chat=is_chat)
    assert len(fitting) == len(rows) - 1
    assert [reason.split(" tokens")[0] for reason in fitting.left_out] in (
        ["with more than 56"],
        ["with more than 64"],
    )


@pytest.mark.parametrize("case", CASES)
def test_a_huge_text_is_refused_by_its_size(case: str, tmp_path: Path):
    fit, kind, huge, good, is_chat = CASES[case]
    rows = rows_of(tmp_path, kind, huge, good, is_chat=is_chat)
    with pytest.raises(DataError, match=r"Row 0 has a text of \d+ characters, and at most \d+ tok"):
        fit(rows, "error", is_chat=is_chat)


@pytest.mark.parametrize("case", CASES)
def test_a_huge_prompt_is_shortened(case: str, tmp_path: Path):
    fit, kind, huge, good, is_chat = CASES[case]
    rows = rows_of(tmp_path, kind, huge, good, is_chat=is_chat)
    fitting = fit(rows, "truncate", is_chat=is_chat)
    assert len(fitting) == len(rows) - (case not in SHORTENED)


def test_a_model_without_a_limit_reads_16_million_characters():
    with pytest.raises(DataError, match="16,000,000"):
        check_prompt_sizes(["x" * 16_000_001], context=None, response_length=8)


@pytest.mark.parametrize(
    "prompt", [HUGE, say(HUGE), {"prompt": HUGE}, {"messages": say(HUGE)}, {"query": HUGE}]
)
def test_a_huge_prompt_of_a_script_is_refused_by_its_row(prompt: Any):
    config = PPOConfig(response_length=8)
    with pytest.raises(DataError, match=r"prompt in row 1 has 3,000,000 characters"):
        make_prompt_set(["w1", prompt], make_chat_tokenizer(), make_policy(), config)
