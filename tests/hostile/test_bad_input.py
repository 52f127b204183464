"""Malformed and hostile input: one message that names the file, and never a traceback."""

import gzip
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import registry
import win_rate
from pipeline.inputs.json_lines import read_jsonl
from pipeline.judges.make_judge import make_judge
from pipeline.judges.reply_cache import ReplyCache, reply_key
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.make_settings import make_settings
from ppo_core.__main__ import main as train
from ppo_core.config.reward_names import read_rewards
from ppo_core.config.row_settings import ReadOptions
from ppo_core.data.encode_prompts import encode_prompts
from ppo_core.data.reward_columns import asked_columns, columns_of
from ppo_core.data.rows.read_rows import read_rows
from ppo_core.errors import ConfigError, DataError, JudgeError, PPOError
from ppo_core.ppo.rewards import make_rewards
from ppo_core.supervised.supervised_cli import main as train_supervised
from tests.helpers.inputs.pipeline_inputs import write_model
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.rollouts import make_rollout
from tests.helpers.models.tiny import make_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.slow_cases import slow

GOOD = b'{"prompt": "a"}\n'


def read_as_text(source: str, **options: Any) -> list[Any]:
    prompts = read_rows(source, "prompts", **options).column("prompt")
    encode_prompts(make_tokenizer(), prompts)
    return prompts


def read_as_chat(source: str, **options: Any) -> list[Any]:
    prompts = read_rows(source, "prompts", is_chat=True, **options).column("prompt")
    encode_prompts(make_chat_tokenizer(), prompts)
    return [prompt[0]["content"] for prompt in prompts]


READERS = {"text": read_as_text, "chat": read_as_chat}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def claiming(rows: int) -> bytes:
    """A Parquet file of one row whose footer claims so many."""
    written = parquet(prompt=["a"])
    claim, value = b"", 2 * rows  # the zigzag form of an integer of Thrift
    while value >= 128:
        claim, value = claim + bytes([value % 128 | 128]), value // 128
    # Field 3 of the footer, the number of rows, and the head of field 4.
    head, one, rest = written.partition(b"\x16\x02\x19\x1c")
    assert one
    body = head + b"\x16" + claim + bytes([value]) + b"\x19\x1c" + rest
    footer = int.from_bytes(written[-8:-4], "little") + len(claim)
    return body[:-8] + footer.to_bytes(4, "little") + b"PAR1"


LINES = {
    "empty": (b"", "is empty"),
    "blank": (b"\n \n\t\n", "is empty"),
    "only-a-bom": (b"\xef\xbb\xbf", "is empty"),
    "no-json": (
        b"hello\n",
        "read: line 1 is not valid JSON: Expecting value at character 1. "
        "The line begins with 'hello'. Correct the line.",
    ),
    "half-a-line": (GOOD + b'{"prompt": "b', "line 2 .* ends inside the string .* character 12"),
    "half-a-line-then-a-line": (
        GOOD + b'{"prompt": "\xc2\x9b2Jb\r\n' + GOOD,
        "read: line 2 is not valid JSON: it ends inside the string that starts at character 12, so "
        r"it is probably cut off\. The line begins with '{\"prompt\": \"\\x9b2Jb'\. Correct",
    ),
    "wrong-escape": (b'{"prompt": "\\q"}\n', r"Invalid \\escape at character 13\. The line"),
    "bad-line-after-a-blank": (GOOD + b"\n{oops\n", "line 3 is not valid JSON"),
    "two-objects-on-a-line": (GOOD.strip() * 2, "line 1 is not valid JSON: Extra data at"),
    "latin-1": (GOOD + '{"prompt": "café"}\n'.encode("latin-1"), r"line 2.*not UTF-8 at byte 15"),
    "utf-16": (GOOD.decode().encode("utf-16"), "UTF-16"),
    "utf-8-of-a-surrogate": (b'{"prompt": "\xed\xa0\x80"}\n', "not UTF-8 at byte 12"),
    "overlong-utf-8": (b'{"prompt": "\xc0\xaf"}\n', "not UTF-8"),
    "half-a-character": (b'{"prompt": "\\ud800"}\n', r"row 0 .*surrogate"),
    "nul-in-a-text": (b'{"prompt": "a\x00b"}\n', "Invalid control character at character 14"),
    "nul-bytes": (b"\x00" * 4096, "line 1 is not valid JSON"),
    "deep-lists": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "nested"),
    "deep-objects": (b'{"prompt": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001 + b"\n", "nested"),
    "a-little-too-deep": (b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}\n", "nested"),
    "open-brackets": (b"[" * 1_000_000, "nested|list of rows"),
    "key-given-twice": (b'{"prompt": "a", "prompt": "b"}\n', "'prompt' is given twice"),
    "a-text-a-line": (b'"a"\n"b"\n', "row 0 .*'a', not an object"),
    "a-number-a-line": (b"1\n2\n", "row 0 .*not an object"),
    "null": (b"null\n", "row 0 .*not an object"),
    "list-of-texts": (b'["a", "b"]\n', "row 0.*'a', not an object"),
    "list-on-every-line": (b'[{"prompt": "a"}]\n[{"prompt": "b"}]\n', "list of rows.*line 2"),
    "empty-list": (b"[]", "is empty"),
    "one-pretty-object": (b'{\n  "prompt": "a"\n}\n', "line 1 is not valid JSON"),
    "columns-instead-of-rows": (b'{"prompt": {"0": "a", "1": "b"}}\n', "object|text|messages"),
    "integer-of-5000-digits": (b'{"prompt": ' + b"9" * 5000 + b"}\n", r"row 0 .*digits"),
    "empty-prompt": (b'{"prompt": ""}\n', "empty prompt"),
    "blank-prompt": (b'{"prompt": " \\n\\t"}\n', "empty prompt"),
    "null-prompt": (b'{"prompt": null}\n', "prompt"),
    "no-column": (b'{"text": "a"}\n', "prompt"),
    "empty-objects": (b"{}\n{}\n", "no column"),
    "a-column-for-every-row": (
        b"".join(b'{"c%d": 1}\n' % number for number in range(2000)),
        "no column prompt",
    ),
    "gzip": (b"\x1f\x8b\x08\x00" + b"\x00" * 30, "gzip"),
    "zip": (b"PK\x03\x04" + b"\x00" * 30, "zip"),
    "parquet": (parquet(prompt=["a"]), "Parquet"),
    "mixed-types": (b'{"prompt": "a"}\n{"prompt": 7}\n{"prompt": ["a"]}\n', "row 1|row is 1"),
    "html": (b"<!DOCTYPE html><html>404</html>", "line 1 is not valid JSON"),
    "csv": (b"prompt\na\n", "line 1 is not valid JSON"),
}
"""Content of a .jsonl file, and what the message says."""

TABLES = {
    "empty": (b"", "Parquet"),
    "magic-alone": (b"PAR1", "Parquet"),
    "other-magic": (b"PAR2" + parquet(prompt=["a"])[4:-4] + b"PAR2", "Parquet"),
    "encrypted-footer": (parquet(prompt=["a"])[:-4] + b"PARE", "Parquet"),
    "cut": (parquet(prompt=["a"] * 50)[:-20], "Parquet"),
    "cut-in-front": (parquet(prompt=["a"] * 50)[20:], "Parquet"),
    "a-billion-rows-claimed": (claiming(10**9), "claim to hold 1000000000 rows"),
    "10**12-rows-claimed": (claiming(10**12), "claim to hold 1000000000000 rows"),
    "two-rows-claimed": (claiming(2), "Parquet"),
    "negative-rows-claimed": (claiming(2**63 - 1), "Parquet"),
    "footer-of-4-gib": (parquet(prompt=["a"])[:-8] + b"\xff\xff\xff\xffPAR1", "Parquet"),
    "footer-of-zeros": (b"PAR1" + b"\x00" * 64 + b"\x40\x00\x00\x00PAR1", "Parquet"),
    "latin-1": (
        parquet(prompt=pyarrow.array([b"caf\xe9"]).view(pyarrow.string())),
        "Parquet.*(UTF8|UTF-8|utf-8)",
    ),
    "no-rows": (parquet(prompt=pyarrow.array([], pyarrow.string())), "is empty"),
    "no-column": (parquet(text=["a"]), "prompt"),
    "bytes": (parquet(prompt=[b"a"]), "prompt|bytes"),
    "nulls": (parquet(prompt=pyarrow.nulls(3)), "prompt"),
    "jsonl": (GOOD, "Parquet"),
}
"""Content of a .parquet file, and what the message says."""


def refuses(reader: str, source: str, says: str, **options: Any) -> None:
    """One line of the project's own error names the data set and the fault."""
    with pytest.raises(DataError) as refused:
        READERS[reader](source, **options)
    message = str(refused.value)
    assert re.search(says, message), message
    assert len(message) < 1500
    assert "\n" not in message


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", LINES)
def test_a_damaged_jsonl_file_is_refused_by_name(tmp_path: Path, reader: str, case: str):
    content, says = LINES[case]
    (tmp_path / "rows.jsonl").write_bytes(content)
    refuses(reader, "rows.jsonl", says)
    with pytest.raises(DataError, match=r"rows\.jsonl|Row 0|Row 1"):
        READERS[reader]("rows.jsonl")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", TABLES)
def test_a_damaged_parquet_file_is_refused_by_name(tmp_path: Path, reader: str, case: str):
    content, says = TABLES[case]
    (tmp_path / "rows.parquet").write_bytes(content)
    refuses(reader, "rows.parquet", says)


def make_nothing(path: Path) -> None:
    """The path stays free."""


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 100 << 30)


def make_two_formats(path: Path) -> None:
    path.mkdir()
    (path / "a.jsonl").write_bytes(GOOD)
    (path / "b.parquet").write_bytes(parquet(prompt=["b"]))


def make_saved(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    (path / "dataset_info.json").write_text("{}")


def make_broken_saved(path: Path) -> None:
    path.mkdir()
    (path / "dataset_dict.json").write_text("[")


PLACES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": ("gone.jsonl", make_nothing, "There is no file"),
    "missing-absolute": ("/nowhere/rows", make_nothing, "There is no file"),
    "missing-up": ("../gone", make_nothing, "There is no file"),
    "a-format": ("json", make_nothing, "is a format"),
    "a-name-with-nul": ("a\0b.jsonl", make_nothing, "There is no file"),
    "a-long-name": ("x" * 5000, make_nothing, "There is no file"),
    "an-empty-name": ("", make_nothing, "There is no file"),
    "a-pattern-of-nothing": ("*.jsonl", make_nothing, "There is no file"),
    "a-folder": ("folder", Path.mkdir, "folder without"),
    "a-folder-of-nothing": ("rows.jsonl", Path.mkdir, "folder without"),
    "a-folder-of-two-formats": ("folder", make_two_formats, "formats .jsonl, .parquet"),
    "a-saved-folder-without-files": ("saved", make_saved, "'saved/gone.arrow' is missing"),
    "a-saved-folder-of-garbage": ("saved", make_broken_saved, "'saved' cannot be read"),
    "a-pipe": ("rows.jsonl", os.mkfifo, "pipe"),
    "a-pipe-of-parquet": ("rows.parquet", os.mkfifo, "pipe"),
    "a-device": ("rows.jsonl", lambda path: path.symlink_to("/dev/zero"), "device"),
    "a-socket": ("rows.jsonl", make_socket, "rows.jsonl.*No such device|socket"),
    "a-link-to-itself": ("rows.jsonl", lambda path: path.symlink_to(path), "symbolic links"),
    "a-link-to-nothing": ("rows.jsonl", lambda path: path.symlink_to("gone"), "No such file"),
    "100-gib-of-nothing": ("rows.jsonl", make_sparse, "64 MiB or more"),
    "another-suffix": ("rows.txt", lambda path: path.write_bytes(GOOD), "ends in '.txt'"),
    "no-suffix": ("rows", lambda path: path.write_bytes(GOOD), "ends in ''"),
}
"""Name of a data set, what is made there, and what the message says."""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", PLACES)
def test_what_is_no_data_set_is_refused_at_once(tmp_path: Path, reader: str, case: str):
    name, make, says = PLACES[case]
    if make is not make_nothing:
        make(tmp_path / name)
    refuses(reader, name, says)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("reader", READERS)
def test_a_file_without_permission_is_refused_by_name(tmp_path: Path, reader: str):
    (tmp_path / "rows.jsonl").write_bytes(GOOD)
    (tmp_path / "rows.jsonl").chmod(0)
    refuses(reader, "rows.jsonl", "'rows.jsonl' cannot be read.*Permission")


ADDRESSES = (
    "s3://bucket/rows.jsonl",
    "http://127.0.0.1:9/rows.jsonl",
    "https://user:pass@127.0.0.1:9/rows.jsonl?key=token",
    "hf://datasets/org/name/rows.jsonl",
    "file:///etc/passwd",
    "gs://bucket/rows.parquet",
    "zip://rows.jsonl::https://127.0.0.1:9/rows.zip",
    "simplecache::rows.jsonl",
)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_refused_unless_a_setting_allows_it(reader: str, address: str):
    refuses(reader, address, "allow_data_urls")
    with pytest.raises(DataError) as refused:
        READERS[reader](address)
    assert "user:pass" not in str(refused.value)
    assert "key=token" not in str(refused.value)


@contextmanager
def server_of(replies: dict[str, tuple[int, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """A server that gives these replies by path; a status of 3xx redirects to its content."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, content = replies[self.path]
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", content.decode())
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize("reader", READERS)
def test_an_allowed_address_is_read_but_no_redirect_is_followed(
    reader: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    replies = {
        "/rows.jsonl": (200, GOOD),
        "/rows.jsonl.gz": (200, gzip.compress(GOOD)),
        "/moved.jsonl": (307, b"/rows.jsonl"),
        "/gone.jsonl": (404, b""),
        "/bad.jsonl": (200, b"{"),
    }
    with server_of(replies) as (url, asked):
        for name in ("rows.jsonl", "rows.jsonl.gz"):
            assert READERS[reader](f"{url}/{name}", options=ReadOptions(allow_urls=True)) == ["a"]
        for path in ("moved.jsonl", "gone.jsonl", "bad.jsonl", "rows.txt"):
            refuses(
                reader, f"{url}/{path}", f"127.0.0.1:.*{path}", options=ReadOptions(allow_urls=True)
            )
    assert asked.count("/rows.jsonl") == 1


NAMES = (
    "[a-z].jsonl",
    "*.jsonl",
    "a?b.jsonl",
    "{a,b}.jsonl",
    "zip::rows.jsonl",
    "a::b::c.parquet",
    "org:test.jsonl",
    "s3:rows.jsonl",
    "-rows.jsonl",
    "--dataset_name.jsonl",
    "rows of mine.jsonl",
    " .jsonl",
    "rows\n.jsonl",
    "läufe-日本語-🎲.jsonl",
    "%2e%2e.jsonl",
    "~rows.jsonl",
    "$HOME.jsonl",
    ".hidden.jsonl",
    "__special__.jsonl",
    "#rows?split=test.jsonl",
    "rows.test.json",
    "dir [1]/rows.jsonl",
    "s3:/bucket/rows.jsonl",
)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_file_is_read_as_it_is_written(tmp_path: Path, reader: str, name: str):
    (tmp_path / "other").mkdir()
    # Files that a pattern would find.
    for other in ("a.jsonl", "axb.jsonl", "c.parquet"):
        (tmp_path / other).write_bytes(b'{"prompt": "wrong"}\n')
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(parquet(prompt=["a"]) if name.endswith("parquet") else GOOD)
    assert READERS[reader](name) == ["a"]
    assert READERS[reader](str(path)) == ["a"]


FOLDERS = ("plain", "with [brackets]", "with*stars", "läufe 日本")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", FOLDERS)
def test_the_name_of_a_folder_is_read_as_it_is_written(tmp_path: Path, reader: str, name: str):
    (tmp_path / name / "more [1]").mkdir(parents=True)
    (tmp_path / name / "more [1]" / "train::1.jsonl").write_bytes(GOOD)
    (tmp_path / name / "test.jsonl").write_bytes(b'{"prompt": "b"}\n')
    assert READERS[reader](name) == ["a"]
    card = "---\nconfigs: [{config_name: default, data_files: 'more*/train::?.jsonl'}]\n---\n"
    (tmp_path / name / "README.md").write_text(card)
    assert READERS[reader](name) == ["a"]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "place",
    [
        "https://127.0.0.1:9/x.jsonl",
        "s3://bucket/x.jsonl",
        "hf://datasets/org/name/x.jsonl",
        "zip://x.jsonl::https://127.0.0.1:9/x.zip",
        "../x.jsonl",
        "/etc/x.jsonl",
        "more/../../x.jsonl",
    ],
)
def test_a_card_that_names_another_place_is_refused(tmp_path: Path, reader: str, place: str):
    (tmp_path / "data" / "more").mkdir(parents=True)
    (tmp_path / "data" / "train.jsonl").write_bytes(GOOD)
    (tmp_path / "x.jsonl").write_bytes(GOOD)
    card = f"---\nconfigs: [{{config_name: default, data_files: '{place}'}}]\n---\n"
    (tmp_path / "data" / "README.md").write_text(card)
    refuses(reader, "data", "README.md of .*, which is not in the folder")


GOOD_FORMS = {
    "bom": b"\xef\xbb\xbf" + GOOD,
    "carriage-returns": b'{"prompt": "a"}\r\n\r\n',
    "no-line-break-at-the-end": b'{"prompt": "a"}',
    "a-list-on-one-line": b'[{"prompt": "a"}]',
    "a-list-on-many-lines": b'\n [\n{"prompt":\n"a"}\n]\n',
    "other-columns": b'{"prompt": "a", "more": {"x": [1, null]}}\n',
    "a-huge-integer-elsewhere": b'{"prompt": "a", "id": 7}\n',
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("form", GOOD_FORMS)
def test_forms_that_tools_write_are_read(tmp_path: Path, reader: str, form: str):
    for name in ("rows.jsonl", "rows.json"):
        (tmp_path / name).write_bytes(GOOD_FORMS[form])
        assert READERS[reader](name) == ["a"]


def test_texts_that_look_like_dates_or_numbers_stay_texts(tmp_path: Path):
    texts = ["2020-01-01", "2021-01-01 10:00:00", "7", "null"]
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    assert read_as_text("rows.jsonl") == read_as_chat("rows.jsonl") == texts


def test_a_parquet_file_cannot_name_a_file_or_address_to_load(tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    column = pyarrow.array([{"bytes": None, "path": str(secret)}])
    features = {"info": {"features": {"prompt": {"_type": "Image"}}}}
    table = pyarrow.table({"prompt": column}).replace_schema_metadata(
        {b"huggingface": json.dumps(features).encode()}
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    for reader in READERS:
        refuses(reader, "rows.parquet", "prompt|dict")


MARGINS = {
    "nan": "NaN",
    "infinite": "Infinity",
    "too-large": "1e999",
    "400-digits": "1" * 400,
    "text": '"many"',
    "true": "true",
    "list": "[1]",
}


@pytest.mark.parametrize("case", MARGINS)
def test_a_margin_that_is_no_finite_number_is_refused(tmp_path: Path, case: str, capsys):
    row = f'{{"prompt": "a", "chosen": "b", "rejected": "c", "margin": {MARGINS[case]}}}\n'
    (tmp_path / "pairs.jsonl").write_text(row)
    with pytest.raises(DataError, match=r"pairs\.jsonl.*margin"):
        read_rows("pairs.jsonl", "pairs")
    load = ["--model_name_or_path", str(tiny_model(tmp_path)), "--dataset_name", "pairs.jsonl"]
    assert train_supervised(["reward", *load, "--output_dir", "out"]) == 1
    assert "margin" in one_line(capsys)


def tiny_model(folder: Path) -> Path:
    """A folder with a tokenizer alone, which is loaded before the model."""
    make_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("\n") == 1, error
    return error


# --- The commands ------------------------------------------------------------------

COMMANDS: dict[str, Callable[[str], int]] = {
    "ppo_core": lambda data: train(["--model_name_or_path", "model", f"--dataset_name={data}"]),
    "supervised": lambda data: train_supervised(
        ["sft", "--model_name_or_path", "model", f"--dataset_name={data}", "--output_dir", "out"]
    ),
    "win_rate": lambda data: win_rate.main(
        ["--model", "model", "--judge", "rule", f"--eval_prompts={data}"]
    ),
    "win_rate-labels": lambda data: win_rate.main(
        ["--model", "model", "--judge", "rule", f"--human_labels={data}"]
    ),
}


@pytest.fixture
def model(tmp_path: Path) -> None:
    """A policy in the folder `model`, whose tokenizer is read before the rows."""
    write_model(tmp_path / "model")


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "case", ["half-a-line", "gzip", *slow("latin-1", "deep-lists", "nul-bytes")]
)
def test_the_commands_refuse_a_damaged_file(tmp_path: Path, command: str, case: str, capsys):
    (tmp_path / "rows [1]::x.jsonl").write_bytes(LINES[case][0])
    assert COMMANDS[command]("rows [1]::x.jsonl") == 1
    assert "rows [1]::x.jsonl" in one_line(capsys)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "name", ["s3://bucket/rows.jsonl", "org/name", *slow("zip::x.jsonl", "a\0b")]
)
def test_the_commands_refuse_an_address_and_what_is_nowhere(command: str, name: str, capsys):
    assert COMMANDS[command](name) == 1
    assert name.partition("\0")[0] in one_line(capsys)


TOML = {
    "syntax": (b"seed = ", "settings.toml"),
    "utf-8": (b'policy = "\xff"', "settings.toml.*utf-8"),
    "latin-1-comment": (b"# caf\xe9\n", "settings.toml.*utf-8"),
    "utf-16": ("seed = 1".encode("utf-16"), "settings.toml.*utf-8"),
    "nul": (b"\x00", "settings.toml"),
    "twice": (b"seed = 1\nseed = 2", "settings.toml"),
    "huge-integer": (b"seed = " + b"9" * 5000, "settings.toml"),
    "deep": (b"seed = " + b"[" * 5000 + b"]" * 5000, "settings.toml"),
    "table": (b"[ppo]\nseed = 1", r"table \[ppo\]"),
    "text-for-a-number": (b'seed = "x"', "seed"),
    "list-for-a-number": (b"seed = [1, 2]", "seed|2"),
    "date": (b"seed = 2020-01-01", "seed"),
    "infinite": (b"learning_rate = inf", "learning_rate=inf"),
    "nan": (b"kl_coef = nan", "kl_coef=nan"),
    "nan-where-infinite-is-allowed": (b"max_grad_norm = nan", "max_grad_norm=nan"),
    "400-digits": (b"total_episodes = " + b"9" * 400, "total_episodes"),
    "seed-of-70-bits": (b"seed = 1180591620717411303424", "seed"),
    "negative-seed": (b"seed = -1", "seed=-1"),
    "unknown": (b"sead = 1", "sead"),
    "empty-key": (b'"" = 1', ".+"),
    "key-with-a-space": (b'"a b" = 1', ".+"),
    "key-with-a-line-break": (b'"a\\nb" = 1', ".+"),
    "nul-in-a-text": (b'output_dir = "a\\u0000b"', "output_dir.*null character"),
    "nul-in-a-list": (b'rewards = ["python:a\\u0000.py:f"]', "rewards.*null character"),
    "gain-of-zero": (b"reward_gain = 0", "reward_gain=0 makes every score 0"),
    "dotted-key": (b"ppo.seed = 1", r"table \[ppo\]"),
}
"""Content of a settings file of `python -m ppo_core`, and what the message says."""


@pytest.mark.parametrize("case", TOML)
def test_a_damaged_settings_file_is_refused(tmp_path: Path, case: str, capsys):
    content, says = TOML[case]
    (tmp_path / "settings.toml").write_bytes(content)
    assert train(["settings.toml", "--model_name_or_path", "m", "--dataset_name", "gone/x"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "gone/x" not in error
    assert re.search(says, error), error


JSON = {
    "syntax": "{",
    "bom": "\ufeff{",
    "list": "[1]",
    "null": "null",
    "deep": "[" * 100_000,
    "digits": '{"seed": ' + "9" * 5000 + "}",
    "twice": '{"seed": 1, "seed": 2}',
    "text-for-a-number": '{"learning_rate": "x"}',
    "null-for-a-number": '{"seed": null}',
    "number-for-a-text": '{"dataset_name": 7}',
    "list-for-a-text": '{"model_name_or_path": ["a"]}',
    "text-for-a-boolean": '{"allow_data_urls": "yes"}',
    "object": '{"stop_token": {}}',
    "number-for-a-list": '{"reward_weights": 1}',
    "nan": '{"kl_coef": NaN}',
    "text-for-a-rank": '{"lora_r": "4", "use_peft": true}',
    "unknown": '{"sead": 1}',
    "half-a-character": '{"dataset_name": "\\ud800"}',
    "nul-in-a-text": '{"output_dir": "a\\u0000b"}',
}


@pytest.mark.parametrize("case", JSON)
def test_a_damaged_json_settings_file_is_refused(tmp_path: Path, case: str, capsys):
    (tmp_path / "settings.json").write_text(JSON[case], encoding="utf-8")
    assert train(["settings.json"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "There is no policy" not in error


@pytest.mark.parametrize("name", ["settings.toml", "settings.json"])
@pytest.mark.parametrize("make", [make_nothing, Path.mkdir, os.mkfifo])
def test_what_is_no_settings_file_is_refused_at_once(tmp_path: Path, name: str, make, capsys):
    make(tmp_path / name)
    assert train([name]) == 1
    assert name in one_line(capsys)


OWN = {"policy": "p", "preferences": "a", "prompts": "b", "eval_prompts": "c", "judge": "rule"}

TABLES_OF_THE_FLOW: dict[str, dict[str, Any]] = {
    "section-as-a-number": {"ppo": 5},
    "section-as-a-list": {"ppo": [{"seed": 1}]},
    "number-as-a-section": {"seed": {"a": 1}},
    "text-for-a-number": {"seed": "1"},
    "nan": {"held_out_share": float("nan")},
    "infinite-section": {"evaluation": {"temperature": float("inf")}},
    "nan-in-a-limit": {"promotion": {"max_kl": float("nan")}},
    "nan-in-a-rate": {"sft": {"learning_rate": float("nan")}},
    "infinite-rate": {"sft": {"learning_rate": float("inf")}},
    "huge-integer": {"sft": {"batch_size": 10**400}},
    "integer-of-70-bits": {"processes": 2**70},
    "huge-seed": {"sft": {"seed": 2**70}},
    "unknown": {"x": 1},
    "unknown-in-a-section": {"lora": {"x" * 10_000: 1}},
    "deep": {"judging": {"criterion": {"a": {"b": {}}}}},
    "boolean-as-a-number": {"accept_reward_model": 1},
    "long-text-for-a-number": {"seed": "x" * 100_000},
    "nul-in-a-path": {"output_dir": "a\0b"},
    "nul-in-a-judge": {"judge": "python:a\0b.py:judge"},
}


@pytest.mark.parametrize("case", TABLES_OF_THE_FLOW)
def test_settings_of_the_flow_are_refused_by_name(case: str):
    for command_line in ({}, {"total_episodes": 8}):
        with pytest.raises(PPOError) as refused:
            make_settings({**OWN, **TABLES_OF_THE_FLOW[case]}, command_line)
        assert len(str(refused.value)) < 20_000


@pytest.mark.parametrize("name", ["a/b", "", "a:b", "../x"])
@pytest.mark.parametrize("command", ["show", "history", "rollback"])
def test_the_registry_refuses_a_name_that_is_none(name: str, command: str, capsys):
    assert registry.main([command, name]) == 1
    assert "registered_model" in one_line(capsys)


# --- The code of users -------------------------------------------------------------

JUDGES = {
    "raises": ("    return 1 / 0", r"ZeroDivisionError in .*own\.py:2 \(judge\): division by"),
    "raises-in-a-generator": ("    yield 'tie'\n    raise KeyError('x')", r"own\.py:3 \(judge\)"),
    "raises-in-a-helper": ("    help()\n\ndef help():\n    {}['x']", r"own\.py:5 \(help\)"),
    "raises-in-a-library": ("    import json\n    json.loads('{')", r"own\.py:3 \(judge\)"),
    "raises-without-a-text": ("    raise ValueError", r"ValueError in .*own\.py:2"),
    "exits": ("    raise SystemExit(0)", r"SystemExit in .*own\.py:2"),
    "recurses": ("    return judge(prompts, pairs)", r"RecursionError in .*own\.py:2"),
    "never-ends": ("    while True: yield 'tie'", "more than 1"),
    "too-few": ("    return []", "0 verdicts for 1"),
    "none": ("    return None", "returned None"),
    "a-number": ("    return 3", "returned 3"),
    "an-array-as-winner": (
        "    import numpy\n    return [{'winner': numpy.zeros(3)}]",
        "for pair 1",
    ),
    "nan-probability": ("    return [{'winner': 'tie', 'probability': float('nan')}]", "pair 1"),
    "huge-probability": ("    return [{'winner': 'tie', 'probability': 10**400}]", "pair 1"),
    "error-without-words": (
        "    raise Odd\n\nclass Odd(Exception):\n    def __str__(self): return 1 / 0",
        r"Odd in .*own\.py:2",
    ),
}


@pytest.mark.parametrize("case", JUDGES)
def test_a_judge_that_fails_is_named_with_its_line(tmp_path: Path, case: str):
    body, says = JUDGES[case]
    (tmp_path / "own.py").write_text(f"def judge(prompts, pairs):\n{body}\n")
    judge = judge_of("python:own.py:judge", tmp_path)
    with pytest.raises(DataError, match=says) as refused:
        judge(["p"], [("a", "b")])
    assert "The judge python:own.py:judge" in str(refused.value)


def judge_of(spec: str, folder: Path) -> Any:
    return make_judge(spec, config=JudgingConfig(), cache_folder=folder, end_of_text=True)


MODULES = {
    "no-python": ("def", "own.py"),
    "unknown-module": ("import nowhere_at_all", "nowhere_at_all"),
    "raises": ("x = 1\n1 / 0", r"ZeroDivisionError in .*own\.py:2"),
    "exits": ("import sys\nsys.exit(0)", r"SystemExit in .*own\.py:2"),
    "nul": ("a = '\0'", "own.py"),
    "no-function": ("judge = 1", "no function 'judge'"),
    "latin-1": ("# caf\udce9", "own.py"),
}


@pytest.mark.parametrize("case", MODULES)
def test_a_judge_that_cannot_be_imported_is_named_with_its_line(tmp_path: Path, case: str):
    source, says = MODULES[case]
    (tmp_path / "own.py").write_bytes(source.encode(errors="surrogateescape"))
    with pytest.raises(PPOError, match=says):
        judge_of("python:own.py:judge", tmp_path)


def raising(prompts: list[str], responses: list[str]) -> list[float]:
    raise LookupError(f"no score for {len(responses)} responses\nin two lines")


REWARDS: dict[str, tuple[Callable[[list[str], list[str]], Any], str]] = {
    "raises": (raising, r"raising raised LookupError in .*test_bad_input\.py:\d+ \(raising\)"),
    "none": (lambda prompts, responses: None, "returned None"),
    "texts": (lambda prompts, responses: ["x"] * len(responses), "not a sequence of numbers"),
    "text": (lambda prompts, responses: "0.5", "not a sequence of numbers"),
    "one-number": (lambda prompts, responses: 0.5, "shape"),
    "too-few": (lambda prompts, responses: [0.5], "shape"),
    "nested": (lambda prompts, responses: [[0.5]] * len(responses), "shape"),
    "ragged": (lambda prompts, responses: [[1.0], [1.0, 2.0], []], "not a sequence of numbers"),
    "huge": (lambda prompts, responses: [10**400] * len(responses), "not a sequence of numbers"),
    "mapping": (lambda prompts, responses: {"a": 1}, "not a sequence of numbers"),
}


@pytest.mark.parametrize("case", REWARDS)
def test_a_reward_function_that_fails_is_named(case: str):
    function, says = REWARDS[case]
    rewards = make_rewards({"mine": function}, make_tokenizer(), batch_size=4)
    if case == "raises":
        rewards = make_rewards(function, make_tokenizer(), batch_size=4)
    with pytest.raises(PPOError, match=says) as refused:
        rewards(["w1"] * 3, make_rollout())
    assert "The reward function" in str(refused.value)


ENTRIES = [
    *("", " ", "=", "a=", "=reward-model", "reward-model:", "python:", "python:=", ":", "a:b:c"),
    *("reward-model\n", "python:a.py:f\x00", "python:\x1b[2J.py:f", "x\ny=python:a.py:f"),
    *("a/b=reward-model", "a b=reward-model", "ü=reward-model", "../x=python:a.py:f"),
    *("reward-model:../../etc", "reward-model:/", "python:ü.py:größe", "python:a.py:<lambda>"),
    *("reward-model:" + "a" * 10_000, "python:" + "/" * 300 + ":f", "x" * 100_000, "😀:😀"),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=range(len(ENTRIES)))
def test_an_entry_of_rewards_has_a_name_that_a_metric_can_have_or_is_refused(entry: str):
    try:
        (found,) = read_rewards([entry])
    except ConfigError as refused:
        assert "A reward is reward-model (the run's own)" in str(refused)
    else:
        assert re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", found.name)
        with pytest.raises(ConfigError, match="twice"):
            read_rewards([entry, entry])


COLUMNS: dict[str, tuple[list[Any], str]] = {
    "misspelt": ([{"prompt": "w1", "refrence": "x"}], r"Did you mean refrence\?"),
    "another case": ([{"prompt": "w1", "Reference": "x"}], r"Did you mean Reference\?"),
    "plural": ([{"prompt": "w1", "references": "x"}], r"Did you mean references\?"),
    "always empty": ([{"prompt": "w1", "reference": None}], "The columns are prompt"),
    "no rows but prompts": (["w1", "w2"], "The rows have no columns"),
    "number as a name": ([{"prompt": "w1", 7: "x"}], r"The columns are prompt\."),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_a_column_that_no_row_has_ends_the_run_before_it_trains(case: str):
    def reward(prompts: list[str], responses: list[str], reference: list[str]) -> list[float]:
        raise AssertionError("called")

    rows, says = COLUMNS[case]
    with pytest.raises(ConfigError, match=f"reward needs the column 'reference'.*{says}"):
        columns_of(rows, [asked_columns("reward", reward)])


# --- Files that the flow wrote -----------------------------------------------------

REPLIES = {
    "empty": b"",
    "syntax": b"{",
    "list": b"[]",
    "other-keys": b'{"text": "a"}',
    "no-text": b'{"text": null, "tokens": 1}',
    "tokens-as-text": b'{"text": "a", "tokens": "1"}',
    "negative-tokens": b'{"text": "a", "tokens": -1}',
    "utf-8": b'{"text": "\xff", "tokens": 1}',
    "deep": b"[" * 100_000,
    "digits": b'{"text": "a", "tokens": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("case", REPLIES)
def test_a_damaged_reply_of_a_judge_is_named(tmp_path: Path, case: str):
    key = reply_key("model", "wording", "p", "a", "b", 1)
    path = tmp_path / key[:2] / f"{key}.json"
    path.parent.mkdir()
    path.write_bytes(REPLIES[case])
    with pytest.raises(JudgeError, match=f"{key}.json"):
        ReplyCache(tmp_path).get(key)


def test_a_folder_in_the_place_of_a_reply_is_named(tmp_path: Path):
    key = reply_key("model", "wording", "p", "a", "b", 1)
    (tmp_path / key[:2] / f"{key}.json").mkdir(parents=True)
    with pytest.raises(JudgeError, match=f"{key}.json"):
        ReplyCache(tmp_path).get(key)


def test_damaged_samples_are_named_with_their_line(tmp_path: Path):
    (tmp_path / "samples.jsonl").write_bytes(GOOD + b"{oops\n")
    with pytest.raises(DataError, match=r"samples\.jsonl.*line 2"):
        read_jsonl(tmp_path / "samples.jsonl")


# --- Real processes ----------------------------------------------------------------

START = {
    "flow": ["flows/rlhf.py", "--no-pylint", "--config", "settings", "{}", "run"],
    "ppo_core": ["-m", "ppo_core", "{}"],
    "supervised": ["-m", "ppo_core.supervised", "sft", "--dataset_name", "{}"],
    "win_rate": ["flows/win_rate.py", "--judge", "rule", "--eval-prompts", "{}", "--model"],
    "registry": ["flows/registry.py", "show", "{}"],
}


@pytest.mark.parametrize(
    "command",
    ["flow", *(pytest.param(name, marks=pytest.mark.slow) for name in START if name != "flow")],
)
def test_a_process_ends_with_1_and_one_message(tmp_path: Path, command: str):
    bad = tmp_path / "bad [1].jsonl"
    bad.write_bytes(b'seed = "\xff"\n')
    words = [word.replace("{}", str(bad)) for word in START[command]]
    if command == "supervised":
        words += ["--output_dir", str(tmp_path / "out"), "--model_name_or_path"]
    if command in ("supervised", "win_rate"):
        # The tokenizer is read before the rows.
        words.append(write_model(tmp_path / "model"))
    ran = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout
    assert str(bad) in ran.stderr
