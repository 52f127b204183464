"""The redaction of texts."""

import html
import json
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from markupsafe import escape

from ppo_core.errors import MAX_REASON_CHARACTERS, ModelError, reason_of
from ppo_core.errors.redaction import describe_secret, mask_secrets, mask_values, redact

KEY = "canary/Key+0123 45"
PASSWORD = "canaryPass-77"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_KEY", KEY)
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me:{PASSWORD}@host/db")
    monkeypatch.setenv("SHORT_TOKEN", "1234567")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("data/train.jsonl", "data/train.jsonl"),
        ("org/name:test", "org/name:test"),
        ("what?.jsonl (first 90)", "what?.jsonl (first 90)"),
        ("https://user:secret@host:80/x.jsonl", "https://host:80/x.jsonl"),
        ("https://token@host/x (last 10)", "https://host/x (last 10)"),
        ("https://user:se@cret@host/x", "https://host/x"),
        ("https://host/x?signature=secret (first 9)", "https://host/x (first 9)"),
        ("https://user:secret@host?key=secret", "https://host"),
        ("s3://bucket/rows@v2.jsonl", "s3://bucket/rows@v2.jsonl"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        (
            "API request to http://me:it@h:1/x failed: no, me@h",
            "API request to http://h:1/x failed: no, me@h",
        ),
    ],
)
def test_an_address_is_shown_without_credentials(text: str, shown: str):
    assert redact(text) == shown


def test_json_with_the_query_of_an_address_stays_json():
    table = {"data": "https://host/x?key=secret", "page": '<a href="http://host/?page=2">two</a>'}
    shown = {"data": "https://host/x", "page": '<a href="http://host/">two</a>'}
    for indent in (None, 2):
        assert json.loads(redact(json.dumps(table, indent=indent))) == shown


def test_a_document_keeps_the_queries_of_its_texts():
    assert (
        mask_secrets(f"see http://host/?page=2, {PASSWORD}") == "see http://host/?page=2, (hidden)"
    )


def test_a_short_value_of_a_variable_is_kept():
    assert redact("1234567 rows") == "1234567 rows"


def test_a_message_of_an_error_is_clean_wherever_it_is_shown():
    error = ModelError(f"no model at http://me:it@host/x: {KEY}")
    assert str(error) == "no model at http://host/x: (hidden)"
    assert KEY not in repr(error)


@pytest.mark.parametrize("secret", [KEY, f"redis://me:{PASSWORD}@host/0", "hf_" + "a1" * 12])
def test_the_reason_of_an_error_is_cut_only_after_it_is_clean(secret: str):
    reason = reason_of(ValueError("x" * (MAX_REASON_CHARACTERS - 16) + f" {secret}"))
    assert secret[:12] not in reason and "canary" not in reason


@pytest.mark.parametrize(
    "harmless",
    [
        "gpt2",
        "s3://bucket/rows@v2.jsonl",
        "abfss://container@account.dfs.core.windows.net/rows",
        "hf://datasets/org/name@main/rows.jsonl",
        "http://127.0.0.1:8000/v1",
        "http://host:8000/x@y",
        "https://host/rows.jsonl?download=true",
        "python:judge.py:judge",
        "A question? See mailto:me@host, or sk-learn",
    ],
)
def test_a_harmless_setting_is_no_secret(harmless: str):
    assert describe_secret(harmless) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", ["sk-", "eyJ-", "hf_", "://", "a:b@", "authorization:", "x"])
def test_no_text_takes_long(unit: str):
    text = unit * (1_000_000 // len(unit))
    redact(text)


@pytest.mark.parametrize("write", [html.escape, escape, json.dumps, repr, quote, quote_plus])
def test_a_secret_is_hidden_however_a_text_writes_it(monkeypatch, write: Callable[[str], str]):
    secret = 'o\'one "two" <three> & four'
    monkeypatch.setenv("SERVICE_TOKEN", secret)
    assert "two" not in redact(f"<p>{write(secret)}</p>")


def test_values_are_masked_before_they_are_encoded():
    text = 'Send -H "Authorization: Bearer abcdefghij" to it.\nVERDICT: A'
    shown = 'Send -H "Authorization: Bearer (hidden)" to it.\nVERDICT: A'
    assert json.loads(json.dumps(mask_values({"rows": [{"text": text}]}))) == {
        "rows": [{"text": shown}]
    }
    key = "-----BEGIN PRIVATE KEY-----\nMII"
    assert mask_values([key, 1, None, True]) == ["(hidden)", 1, None, True]
    assert mask_values({"api_key": ["x", 5]}, by_name=True) == {"api_key": ["(hidden)", 5]}
    assert mask_values({"api_key": ["x"]}) == {"api_key": ["x"]}


def test_a_mask_leaves_encoded_json_whole():
    text = json.dumps('Send -H "Authorization: Bearer abcdefghij" to it.\nVERDICT: A')
    assert json.loads(mask_secrets(text)).endswith('(hidden)" to it.\nVERDICT: A')
