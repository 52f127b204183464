"""Loading rows from files, folders and splits, and the errors."""

import json

import pytest
from datasets import Dataset, DatasetDict

from ppo_core.data.dataset_files import load_rows
from ppo_core.errors import ConfigError, DataError

ROWS = [{"prompt": "w0"}, {"prompt": "w1"}]


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_lines(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_files_of_every_format_give_their_rows(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    write_lines(tmp_path / "rows.jsonl")
    for ending in ("json", "jsonl", "parquet"):
        assert load_rows(str(tmp_path / f"rows.{ending}")).to_list() == ROWS


def test_messages_are_read_as_they_were_written(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "w0"}]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert load_rows(str(tmp_path / "rows.jsonl")).to_list() == rows


STRANGE_PARTS = [
    # With use_json, `datasets` loops forever on the first one.
    # Arrow takes the two keys of the second one for the same.
    {"\x9c": [None, 0.8, False], "../x": [False, 3.5513952e294]},
    {"": None, "\0": None},
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", STRANGE_PARTS)
def test_parts_without_an_arrow_type_are_kept(tmp_path, part):
    rows = [{"prompt": "a", "more": part}, {"prompt": "b"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    read = load_rows(str(tmp_path / "rows.json"))
    assert read["prompt"][:] == ["a", "b"]
    assert list(read[0]["more"]) == list(part)
    assert read[1]["more"] is None


def test_a_slice_of_a_split_is_part_of_it(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl")
    assert load_rows(str(path), split="train[:1]").to_list() == ROWS[:1]


def test_folders_that_datasets_saved_are_read_back(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "several")
    assert load_rows(str(tmp_path / "one")).to_list() == ROWS
    assert load_rows(str(tmp_path / "several"), split="test").to_list() == ROWS
    with pytest.raises(DataError, match="Choose one of its splits: test"):
        load_rows(str(tmp_path / "several"))
    with pytest.raises(DataError, match=r"has no split 'test'.* one of its splits: train"):
        load_rows(str(tmp_path / "one"), split="test")


def test_a_folder_of_files_has_the_splits_that_they_are_named_after(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "train.jsonl")
    (folder / "test.jsonl").write_text('{"prompt": "w9"}\n')
    assert load_rows(str(folder)).to_list() == ROWS
    assert load_rows(str(folder), split="test").to_list() == [{"prompt": "w9"}]


def test_the_root_folder_is_refused_before_all_of_it_is_listed():
    with pytest.raises(DataError, match=r"'/' has more than \d+ files .* Name the folder"):
        load_rows("/")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "", "is empty"),
        ("rows.jsonl", " \n", "is empty"),
        ("rows.json", "[]", "cannot be read|has no row"),
        ("rows.jsonl", '{"prompt": "w0"}\n{oops\n', "cannot be read: .*row 1"),
        ("rows.parquet", "oops", "cannot be read"),
        ("rows.csv", "prompt\nw0\n", "ends in '.csv'"),
    ],
)
def test_a_file_without_rows_or_of_another_format_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_rows(str(tmp_path / name))


def test_what_is_not_there_is_refused_with_the_place_where_it_was_sought(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"no file or folder {tmp_path / 'none.jsonl'}"):
        load_rows("none.jsonl")
    with pytest.raises(DataError, match=f"not a local file or folder .{tmp_path / 'no/such'}"):
        load_rows("no/such")
    write_lines(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"'rows.jsonl' has no split 'test'"):
        load_rows("rows.jsonl", split="test")


def test_a_local_file_has_no_configuration(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match="is local and has no configuration 'small'"):
        load_rows(str(path), config="small")
