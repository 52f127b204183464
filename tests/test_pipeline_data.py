import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.data import held_out, read_rows, write_jsonl
from ppo_core.errors import DataError


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def jsonl(rows: list[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


ROWS = [{"prompt": "a", "reference": "x", "more": 1}, {"prompt": "b", "reference": "", "more": 2}]
READ = [{"prompt": "a", "reference": "x"}, {"prompt": "b", "reference": ""}]


def test_every_format_gives_the_same_rows_and_the_same_digest(tmp_path: Path):
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    sources = [
        write(tmp_path / "rows.jsonl", jsonl(ROWS)),
        write(tmp_path / "rows.json", json.dumps(ROWS)),
        str(tmp_path / "rows.parquet"),
    ]
    read = [read_rows(source, ["prompt"], ["reference", "absent"]) for source in sources]
    assert [rows.usable for rows in read] == [READ, READ, READ]
    assert len({rows.digest for rows in read}) == 1
    assert read[0].column("prompt") == ["a", "b"]
    assert read[0].has("reference")
    assert not read[0].has("absent")


def test_a_data_set_of_the_hub_is_read_by_its_split(tmp_path: Path, monkeypatch):
    # A folder is loaded by the same call as an id of the hub.
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", jsonl(ROWS))
    write(tmp_path / "set" / "test.jsonl", jsonl(ROWS[:1]))
    monkeypatch.chdir(tmp_path)
    assert len(read_rows("set", ["prompt"]).usable) == 2
    assert len(read_rows("set:test", ["prompt"]).usable) == 1


def test_the_digest_is_that_of_the_columns_that_are_read(tmp_path: Path):
    one = write(tmp_path / "one.jsonl", jsonl([{"prompt": "a", "more": 1}]))
    two = write(tmp_path / "two.jsonl", jsonl([{"prompt": "a", "more": 2}]))
    three = write(tmp_path / "three.jsonl", jsonl([{"prompt": "b", "more": 1}]))
    digests = [read_rows(path, ["prompt"]).digest for path in (one, two, three)]
    assert digests[0] == digests[1] != digests[2]


def test_one_bad_prompt_in_a_hundred_is_set_aside(tmp_path: Path):
    for bad in ("", "  \n", None, 7, ["a"]):
        rows = [{"prompt": f"p{i}"} for i in range(99)] + [{"prompt": bad}]
        read = read_rows(write(tmp_path / "rows.jsonl", jsonl(rows)), ["prompt"])
        assert len(read.usable) == 99
        assert [row["row"] for row in read.quarantined] == [99]


def test_two_bad_prompts_in_a_hundred_are_refused(tmp_path: Path):
    rows = [{"prompt": f"p{i}"} for i in range(98)] + [{"prompt": ""}, {"prompt": None}]
    path = write(tmp_path / "rows.jsonl", jsonl(rows))
    with pytest.raises(DataError, match=r"2 of the 100 rows .*the first is row 98.*Mend or remove"):
        read_rows(path, ["prompt"])


def test_a_response_may_be_empty_but_must_be_a_text(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", jsonl([{"chosen": "a", "rejected": ""}]))
    assert read_rows(path, ["chosen", "rejected"]).quarantined == []
    path = write(tmp_path / "rows.jsonl", jsonl([{"chosen": "a", "rejected": None}]))
    with pytest.raises(DataError, match="1 of the 1 rows"):
        read_rows(path, ["chosen", "rejected"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.jsonl", None, r"There is no file .*absent\.jsonl"),
        ("empty.jsonl", "", r"empty\.jsonl is empty"),
        ("blank.jsonl", "\n \n", r"blank\.jsonl is empty"),
        ("empty.json", "[]", r"empty\.json is empty"),
        ("rows.csv", "prompt\na\n", r"ends in '\.csv'; rows are read from \.jsonl, \.json"),
        ("broken.jsonl", '{"prompt": "a"\n', r"broken\.jsonl cannot be read as json"),
        (
            "other.jsonl",
            '{"text": "a", "label": 1}\n',
            r"no column prompt; its columns are text, label",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | None, message: str):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_rows(str(path), ["prompt"])


def test_held_out_rows_are_the_last_and_never_none(tmp_path: Path):
    rows = read_rows(
        write(tmp_path / "r.jsonl", jsonl([{"prompt": str(i)} for i in range(10)])), ["prompt"]
    )
    train, test = held_out(rows, 0.2)
    assert train.column("prompt") == [str(i) for i in range(8)]
    assert test.column("prompt") == ["8", "9"]
    assert len(held_out(rows, 0.001)[1].usable) == 1
    assert len(held_out(rows, 0.999)[0].usable) == 1


def test_one_row_cannot_be_split(tmp_path: Path):
    rows = read_rows(write(tmp_path / "r.jsonl", jsonl([{"prompt": "a"}])), ["prompt"])
    with pytest.raises(DataError, match="none can be held out"):
        held_out(rows, 0.5)


def test_written_rows_are_read_again(tmp_path: Path):
    rows = [{"prompt": "Zoë said\n“no”"}, {"prompt": "b"}]
    write_jsonl(tmp_path / "r.jsonl", rows)
    assert read_rows(str(tmp_path / "r.jsonl"), ["prompt"]).usable == rows
