"""The redaction of what a process writes."""

import io
import subprocess
import sys

import pytest

from ppo_core.errors.redacted_output import RedactedStream
from tests.helpers.paths import ROOT

KEY = "canary/Key+0123 45"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_KEY", KEY)


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


def test_bytes_are_redacted_as_text_and_a_split_character_is_kept(monkeypatch):
    monkeypatch.setenv("OTHER_API_KEY", "canärÿ/Key+0123")
    below = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stream = RedactedStream(below)
    for data in ("key canärÿ/Key+0123 ".encode(), b"\xc3", b"\xa4 \xff\n"):
        stream.buffer.write(data)
    assert below.buffer.getvalue() == b"key (hidden) \xc3\xa4 \xff\n"


def written_bytes(*parts: bytes | str, flush: bool = False) -> bytes:
    below = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stream = RedactedStream(below)
    for part in parts:
        stream.write(part) if isinstance(part, str) else stream.buffer.write(part)
        if flush:
            stream.buffer.flush()
    stream.release()
    below.flush()
    return below.buffer.getvalue()


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("cut", range(5, len("canärÿ/Key+0123".encode())))
def test_a_secret_split_between_two_writes_of_bytes_is_masked(cut: int, flush: bool, monkeypatch):
    monkeypatch.setenv("OTHER_API_KEY", "canärÿ/Key+0123")
    key = "canärÿ/Key+0123".encode()
    assert written_bytes(b"key ", key[:cut], key[cut:], b".\n", flush=flush) == b"key (hidden).\n"


def test_bytes_stay_in_order_with_text_and_none_is_lost():
    assert written_bytes("sk-", b"eyJ", "hf_", b"\xc3", "x", b"\xc3") == b"sk-eyJhf_\xc3x\xc3"


def test_lines_of_bytes_are_redacted():
    below = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    RedactedStream(below).buffer.writelines([b"key ", KEY.encode(), b"\n"])
    assert below.buffer.getvalue() == b"key (hidden)\n"


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


def test_a_private_key_in_a_long_text_is_masked():
    key = "-----BEGIN PRIVATE KEY-----\nMIIcanary\n-----END PRIVATE KEY-----\n"
    assert written("line\n" * 3000 + key) == "line\n" * 3000 + "(hidden)\n"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", ["sk-", "eyJ-", "hf_", "://", "a:b@", "authorization:", "x"])
def test_no_line_takes_long(unit: str):
    text = unit * (9_000 // len(unit))
    written(text, text)


PROGRAM = """
import logging, os, sys, threading, warnings
early = logging.StreamHandler()
logging.getLogger("early").addHandler(early)
from ppo_core.errors.redacted_output import install_redaction
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
