"""The redaction of texts and of output streams."""

import io
import subprocess
import sys

import pytest

from ppo_core.errors import ModelError
from ppo_core.errors.redaction import RedactedStream, describe_secret, mask_secrets, redact
from tests.helpers.paths import ROOT

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
    written(text[:9_000], text[:9_000])


def written(*texts: str, flush: bool = False) -> str:
    below = io.StringIO()
    stream = RedactedStream(below)
    for text in texts:
        stream.write(text)
        if flush:
            stream.flush()
    stream.release()
    return below.getvalue()


@pytest.mark.parametrize("cut", range(1, len(KEY)))
def test_a_secret_split_between_two_writes_is_masked(cut: int):
    assert written("key ", KEY[:cut], KEY[cut:], ".\n") == "key (hidden).\n"


@pytest.mark.parametrize("cut", range(4, len(KEY)))
def test_a_secret_split_by_a_flush_is_masked(cut: int):
    assert written("key ", KEY[:cut], KEY[cut:], ".\n", flush=True) == "key (hidden).\n"


def test_an_address_split_between_two_writes_is_redacted():
    assert written("at http://me:", "it@host/x?", "a=b\n") == "at http://host/x\n"


def test_other_output_is_not_held_back():
    below = io.StringIO()
    stream = RedactedStream(below)
    for text in ("\r 10%", "\r 20%", "Continue? "):
        stream.write(text)
    assert below.getvalue() == "\r 10%\r 20%Continue? "


def test_a_flush_shows_an_unfinished_address():
    below = io.StringIO()
    stream = RedactedStream(below)
    stream.write("See http://host/x")
    stream.flush()
    assert below.getvalue() == "See http://host/x"


def test_a_long_line_is_data_whose_addresses_are_kept():
    page = "http://host/?page=2 " * 1000
    assert written(f"{page}{KEY}\n") == f"{page}(hidden)\n"


PROGRAM = """
import logging, os, sys, threading, warnings
early = logging.StreamHandler()
logging.getLogger("early").addHandler(early)
from ppo_core.errors.redaction import install_redaction
install_redaction()
install_redaction()
key = os.environ["SOME_API_KEY"]
print("print", key)
print(f"no newline {key}"[:-9], end="", flush=True)
print(key[-9:])
sys.stdout.buffer.write(f"bytes {key}\\n".encode())
logging.getLogger("early").error("early %s", key)
logging.getLogger("late").error("late %s", key)
warnings.warn(key)
def fail():
    raise RuntimeError(key)
thread = threading.Thread(target=fail)
thread.start()
thread.join()
from tqdm import tqdm
for _ in tqdm(range(3), desc=key):
    pass
assert sys.stdout.encoding and sys.stderr.fileno() == 2 and not sys.stdout.isatty()
sys.stdout.write(key[:7])
fail()
"""


def test_no_output_of_a_process_has_the_secret():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    output = ran.stdout + ran.stderr
    assert KEY not in output
    assert ran.returncode == 1
    assert ran.stdout == f"print (hidden)\nno newline (hidden)\nbytes (hidden)\n{KEY[:7]}"
    for line in (
        "early (hidden)",
        "late (hidden)",
        "UserWarning: (hidden)",
        "RuntimeError: (hidden)",
        "(hidden): 100%",
    ):
        assert line in ran.stderr
