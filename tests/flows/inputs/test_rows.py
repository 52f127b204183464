import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.inputs.rows import held_out, read_jsonl, read_rows, write_jsonl
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
    with pytest.raises(
        DataError, match=r"2 of the 100 rows .*the first such row is 98.*Correct or remove"
    ):
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
        ("empty.jsonl", "", r"empty\.jsonl' is empty"),
        ("blank.jsonl", "\n \n", r"blank\.jsonl' is empty"),
        ("empty.json", "[]", r"empty\.json' is empty"),
        (
            "rows.csv",
            "prompt\na\n",
            r"ends in '\.csv', but rows are read only from \.jsonl",
        ),
        ("broken.jsonl", '{"prompt": "a"\n', r"broken\.jsonl' cannot be read: row 0 \(line 1\)"),
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


LABELS = {"margin": (int, float), "tie": (bool,), "source": (str,), "annotator": (str, int)}


def labelled(path: Path, rows: list[object]) -> str:
    return write(path, jsonl([{"prompt": "a", **row} for row in rows]))


def test_labels_are_read_as_they_are_and_are_none_where_they_are_missing(tmp_path: Path):
    rows = [
        {"margin": 1.5, "tie": False, "source": "x", "annotator": 7},
        {"margin": None, "tie": True, "annotator": 8},
    ]
    read = read_rows(labelled(tmp_path / "r.jsonl", rows), ["prompt"], labels=LABELS)
    assert read.usable == [
        {"prompt": "a", "margin": 1.5, "tie": False, "source": "x", "annotator": 7},
        {"prompt": "a", "margin": None, "tie": True, "source": None, "annotator": 8},
    ]
    assert read.quarantined == []


def test_labels_change_the_digest_only_where_they_are_there(tmp_path: Path):
    plain = labelled(tmp_path / "plain.jsonl", [{"more": 1}])
    one = labelled(tmp_path / "one.jsonl", [{"margin": 1.0}])
    two = labelled(tmp_path / "two.jsonl", [{"margin": 2.0}])
    unread = [read_rows(path, ["prompt"]).digest for path in (plain, one, two)]
    assert len(set(unread)) == 1
    read = [read_rows(path, ["prompt"], labels=LABELS).digest for path in (plain, one, two)]
    assert read[0] == unread[0]
    assert len(set(read)) == 3


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ({"margin": 1.0}, {"margin": "much"}, r"or no int or float in margin; .* margin: 'much'"),
        ({"margin": 1.0}, {"margin": True}, "or no int or float in margin"),
        ({"margin": 1.0}, {"margin": float("nan")}, "or no int or float in margin"),
        ({"margin": 1.0}, {"margin": float("inf")}, "or no int or float in margin"),
        ({"tie": True}, {"tie": 1}, "or no bool in tie"),
        ({"source": "x"}, {"source": 3}, "or no str in source"),
        ({"annotator": "x"}, {"annotator": ["x"]}, "or no str or int in annotator"),
    ],
)
def test_a_label_of_another_type_makes_its_row_unusable(tmp_path: Path, good, bad, message: str):
    path = labelled(tmp_path / "r.jsonl", [good] * 99 + [bad])
    read = read_rows(path, ["prompt"], labels=LABELS)
    assert len(read.usable) == 99
    assert [row["row"] for row in read.quarantined] == [99]
    assert len(read_rows(path, ["prompt"]).usable) == 100
    with pytest.raises(DataError, match=message):
        read_rows(labelled(tmp_path / "bad.jsonl", [good, bad]), ["prompt"], labels=LABELS)


def test_numbers_written_as_texts_are_no_numbers(tmp_path: Path):
    path = labelled(tmp_path / "r.jsonl", [{"margin": "1.0"}])
    with pytest.raises(DataError, match=r"or no int or float in margin; .* margin: '1\.0'"):
        read_rows(path, ["prompt"], labels=LABELS)


def test_an_error_shows_a_label_behind_long_texts(tmp_path: Path):
    rows = [{"reference": "long " * 100, "margin": "much"}]
    path = labelled(tmp_path / "r.jsonl", rows)
    with pytest.raises(DataError, match="margin: 'much'"):
        read_rows(path, ["prompt"], ["reference"], LABELS)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "café"}\n'.encode("latin-1"))
    with pytest.raises(
        DataError, match=r"latin\.jsonl' cannot be read: row 0 .* not UTF-8 at byte 15"
    ):
        read_rows(str(path), ["prompt"])


def test_what_was_written_is_read_whatever_ends_a_line_elsewhere(tmp_path: Path):
    rows = [{"prompt": "a\u2028b\x85c\x1cd\r\ne", "ppo": "\n"}, {"prompt": "", "ppo": "\x0c"}]
    write_jsonl(tmp_path / "samples.jsonl", rows)
    assert read_jsonl(tmp_path / "samples.jsonl") == rows
