import pytest

from serving.redaction import without_credentials


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
    assert without_credentials(text) == shown
