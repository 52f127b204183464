"""Loading rows from files, folders and splits, and the errors."""

import gzip
import json

import pytest
from datasets import Dataset, DatasetDict, load_dataset

from ppo_core.data.sources import data_folders
from ppo_core.data.sources.source import open_source, source_of_rows
from ppo_core.errors import ConfigError, DataError

ROWS = [{"prompt": "w0"}, {"prompt": "w1"}]


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(name, split=None, config=None):
    return list(open_source(str(name), split, config).rows())


def write_lines(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_files_of_every_format_give_their_rows(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    lines = write_lines(tmp_path / "rows.jsonl").read_bytes()
    (tmp_path / "rows.csv").write_text('\ufeffprompt\n"w0"\nw1\n', encoding="utf-8")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress((tmp_path / "rows.csv").read_bytes()))
    (tmp_path / "rows.pq").write_bytes((tmp_path / "rows.parquet").read_bytes())
    (tmp_path / "rows.tsv").write_bytes((tmp_path / "rows.csv").read_bytes())
    (tmp_path / "rows.tsv.gz").write_bytes((tmp_path / "rows.csv.gz").read_bytes())
    plain = ("json", "jsonl", "parquet", "pq", "csv", "tsv")
    for ending in (*plain, "jsonl.gz", "csv.gz", "tsv.gz"):
        assert load(tmp_path / f"rows.{ending}") == ROWS


def test_messages_are_read_as_they_were_written(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "w0"}]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert load(tmp_path / "rows.jsonl") == rows


def test_a_slice_of_a_split_is_part_of_it(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl")
    assert load(path, "train[:1]") == ROWS[:1]


def test_folders_that_datasets_saved_are_read_back(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "several")
    assert load(tmp_path / "one") == ROWS
    assert load(tmp_path / "several", "test") == ROWS
    with pytest.raises(DataError, match="Choose one of its splits: test"):
        load(tmp_path / "several")
    with pytest.raises(DataError, match=r"has no split 'test'.* one of its splits: train"):
        load(tmp_path / "one", "test")


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_a_saved_folder_has_plain_values_whatever_its_format(tmp_path, form):
    rows = [{"input_ids": [1, 2], "tie": False}]
    Dataset.from_list(rows).with_format(form).save_to_disk(tmp_path / "saved")
    (row,) = load(tmp_path / "saved")
    assert row == rows[0]
    assert (type(row["input_ids"]), type(row["tie"])) == (list, bool)


def test_an_address_with_a_user_is_refused_without_its_password():
    with pytest.raises(DataError, match=r"'https://host/rows\.jsonl' has a user name") as caught:
        open_source("https://ann:canary@host/rows.jsonl", allow_urls=True)
    assert "canary" not in str(caught.value)


def test_rows_in_memory_may_be_a_stream():
    for rows in (iter(ROWS), Dataset.from_list(ROWS).to_iterable_dataset()):
        assert list(source_of_rows(rows).rows()) == ROWS


def test_a_folder_of_files_has_the_splits_that_they_are_named_after(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "train.jsonl")
    (folder / "test.jsonl").write_text('{"prompt": "w9"}\n')
    # Spark names the folder of its files like a file.
    (folder / "train.jsonl.gz").mkdir()
    assert load(folder) == ROWS
    assert load(folder, "test") == [{"prompt": "w9"}]


CARDS = {
    "splits": (
        "configs: [{config_name: default, data_files: [{split: train, path: a.jsonl}, "
        "{split: held_out, path: [b/*.jsonl]}]}]",
        {"train": ["a"], "held_out": ["b1", "b2"]},
    ),
    "one pattern": ("configs: [{config_name: any, data_files: 'b/*'}]", {"train": ["b1", "b2"]}),
    "several patterns": (
        "configs: [{config_name: any, data_files: [a.jsonl, b/2.jsonl]}]",
        {"train": ["a", "b2"]},
    ),
    "a default configuration": (
        "configs: [{config_name: x, data_files: a.jsonl}, "
        "{config_name: y, default: true, data_files: b/1.jsonl}]",
        {"train": ["b1"]},
    ),
    "the configuration `default`": (
        "configs: [{config_name: x, data_files: a.jsonl}, "
        "{config_name: default, data_files: b/1.jsonl}]",
        {"train": ["b1"]},
    ),
    "a slice": (
        "configs: [{config_name: default, data_files: [{split: dev, path: 'b/*'}]}]",
        {"dev[:1]": ["b1"]},
    ),
    "no splits": ("license: mit", {"train": ["a", "b1", "b2"]}),
    "no front": ("", {"train": ["a", "b1", "b2"]}),
}
"""The head of a README.md, and the rows of each split that it names."""


def write_card(folder, head):
    for name, text in (("a", "a"), ("b/1", "b1"), ("b/2", "b2")):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"prompt": text}) + "\n")
    (folder / "README.md").write_text(f"---\n{head}\n---\n# Data\n" if head else "# Data\n")


@pytest.mark.parametrize("form", CARDS)
def test_the_card_of_a_folder_names_its_splits(tmp_path, form):
    head, splits = CARDS[form]
    write_card(tmp_path, head)
    for split, expected in splits.items():
        assert [row["prompt"] for row in load(tmp_path, split)] == expected
        theirs = load_dataset(str(tmp_path), split=split, cache_dir=str(tmp_path / "c"))
        assert list(theirs["prompt"]) == expected


def test_a_pattern_of_a_card_that_matches_too_many_files_is_refused(tmp_path, monkeypatch):
    write_card(tmp_path, "configs: [{config_name: any, data_files: 'b/*'}]")
    monkeypatch.setattr(data_folders, "MOST_ENTRIES", 1)
    with pytest.raises(DataError, match="matches more than 1 files, and none of them was read"):
        load(tmp_path)


def test_hidden_folders_do_not_count(tmp_path, monkeypatch):
    (tmp_path / ".git" / "objects").mkdir(parents=True)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(data_folders, "MOST_ENTRIES", 1)
    assert [row["prompt"] for row in load(tmp_path)] == ["a"]
    (tmp_path / "test.jsonl").write_text('{"prompt": "b"}\n')
    with pytest.raises(DataError, match="has more than 1 files and folders below it"):
        load(tmp_path)


def test_the_card_of_a_folder_has_configurations(tmp_path):
    write_card(
        tmp_path,
        "configs: [{config_name: x, data_files: a.jsonl}, {config_name: y, data_files: 'b/*'}]",
    )
    assert [row["prompt"] for row in load(tmp_path, config="y")] == ["b1", "b2"]
    assert [row["prompt"] for row in load(f"{tmp_path}:y/train[:1]")] == ["b1"]
    with pytest.raises(
        ConfigError, match=f"x, y, but no default. .* '{tmp_path}:x/train', .* --dataset_config x"
    ):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"no configuration 'z'\. Its README.md names x, y"):
        load(tmp_path, config="z")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("../a.jsonl", "is not in the folder"),
        ("/etc/hostname", "is not in the folder"),
        ("c/*.jsonl", "but no file matches it"),
        ("[a.jsonl, 5]", "has a int where"),
        ("[{split: [dev], path: a.jsonl}]", "has a list where"),
        ("[{path: {a: b}}]", "has a dict where"),
        ("[{split: dev}]", "has a NoneType where"),
        ("'**a/**'", "is not a pattern|there is no file"),
        ("{", "cannot be read"),
    ],
)
def test_a_card_that_names_other_files_is_refused(tmp_path, path, words):
    write_card(tmp_path, f"configs: [{{config_name: x, data_files: {path}}}]")
    with pytest.raises(DataError, match=words):
        load(tmp_path)


def test_a_card_of_nested_aliases_is_refused_without_writing_them_out(tmp_path):
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    aliases = "\n".join(["a0: &a0 x", *levels])
    write_card(tmp_path, f"{aliases}\nconfigs: [{{config_name: *a11, data_files: *a11}}]")
    with pytest.raises(DataError, match="has a list where"):
        load(tmp_path)


def test_the_root_folder_is_refused_before_all_of_it_is_listed():
    with pytest.raises(DataError, match=r"'/' (has more than \d+ files .* Name|cannot be read)"):
        load("/")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"prompt": "w0"}\n{oops\n', "cannot be read: line 2"),
        ("rows.parquet", "oops", "cannot be read"),
        ("rows.txt", "prompt\nw0\n", "ends in '.txt'"),
        ("rows.pq", "oops", "cannot be read as Parquet"),
        ("rows.pq.gz", "oops", "ends in '.gz'"),
        ("rows.tsv", "prompt\tanswer\nw0\tw1\nw2,w3\n", "line 3 has 1 values for 2 columns"),
        ("rows.tsv", "prompt\tprompt\nw0\tw1\n", "several columns have the name 'prompt'"),
        ("rows.tsv", 'prompt\n"w0\n', "cannot be read as TSV.* separated by tabs"),
        ("rows.csv", f"prompt\n{'w' * 131_073}\n", "131072.* values of at most 131,072 characters"),
        ("rows.tsv", f"prompt\n{'w' * 200_000}\n", "larger than field limit"),
        ("rows.tsv.gz", "oops", "cannot be read as TSV.*gzip"),
        ("rows.csv", "prompt,answer\nw0,w1\nw2\n", "line 3 has 1 values for 2 columns"),
        ("rows.csv", "prompt,prompt\nw0,w1\n", "several columns have the name 'prompt'"),
        ("rows.csv", 'prompt\n"w0\n', "cannot be read as CSV"),
        ("rows.csv", f"prompt\n{'w' * 200_000}\n", "larger than field limit"),
        ("rows.jsonl.gz", "oops", "cannot be read: .*gzip"),
    ],
)
def test_a_file_of_another_format_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)


def test_what_is_not_there_is_refused_with_the_place_where_it_was_sought(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"no file or folder {tmp_path / 'none.jsonl'}"):
        load("none.jsonl")
    with pytest.raises(DataError, match=f"not a local file or folder .{tmp_path / 'no/such'}"):
        load("no/such")
    # With a split from a setting, a name cannot have another split.
    with pytest.raises(DataError, match=r"--dataset_name org/name --dataset_train_split test.$"):
        load("org/name:test", "train")
    words = f"--dataset_name {tmp_path} --dataset_train_split train --dataset_config x.$"
    with pytest.raises(DataError, match=words):
        load(f"{tmp_path}:x/train", "train")
    write_lines(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"'rows.jsonl' has no split 'test'"):
        load("rows.jsonl", "test")


def test_a_local_file_has_no_configuration(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match="is local and has no configuration 'small'"):
        load(path, config="small")


def test_only_tabs_are_between_the_values_of_a_tsv_file(tmp_path):
    text = 'prompt\tanswer\nw0, w1\tsay "w2"\n"w3\tw4\nw5"\tw6\n'
    (tmp_path / "rows.tsv").write_text(text)
    assert load(tmp_path / "rows.tsv") == [
        {"prompt": "w0, w1", "answer": 'say "w2"'},
        {"prompt": "w3\tw4\nw5", "answer": "w6"},
    ]


def test_a_folder_of_tsv_files_and_one_of_pq_files_have_splits(tmp_path):
    (tmp_path / "tsv").mkdir()
    (tmp_path / "tsv" / "train.tsv").write_text("prompt\nw0\nw1\n")
    (tmp_path / "tsv" / "test.tsv.gz").write_bytes(gzip.compress(b"prompt\nw2\n"))
    assert load(tmp_path / "tsv") == ROWS
    assert load(tmp_path / "tsv", "test") == [{"prompt": "w2"}]
    (tmp_path / "pq").mkdir()
    Dataset.from_list(ROWS).to_parquet(tmp_path / "pq" / "train-00000-of-00001.pq")
    assert load(tmp_path / "pq") == ROWS


def test_an_empty_file_has_no_rows(tmp_path):
    for name, content in (
        ("a.jsonl", " \n"),
        ("b.json", "[]"),
        ("c.csv", ""),
        ("d.csv", "prompt\n"),
    ):
        (tmp_path / name).write_text(content)
        assert load(tmp_path / name) == []


def test_a_cut_gzip_file_is_refused(tmp_path):
    whole = gzip.compress(write_lines(tmp_path / "rows.jsonl").read_bytes() * 1000)
    (tmp_path / "rows.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"rows.jsonl.gz' cannot be read"):
        load(tmp_path / "rows.jsonl.gz")


def test_the_digest_is_that_of_the_content_and_the_slice(tmp_path):
    one = write_lines(tmp_path / "one.jsonl")
    two = write_lines(tmp_path / "two.jsonl")
    digest = open_source(str(one)).digest
    assert open_source(str(two)).digest == digest
    assert open_source(str(one), "train[:1]").digest != digest
    two.write_text('{"prompt": "w2"}\n')
    assert open_source(str(two)).digest != digest


def test_a_folder_names_its_split_after_a_colon(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "train.jsonl")
    (folder / "test.jsonl").write_text('{"prompt": "w9"}\n')
    assert load(f"{folder}:test") == [{"prompt": "w9"}]
    assert load(f"{folder}:train[1:]") == ROWS[1:]
    with pytest.raises(DataError, match="has no split 'dev'"):
        load(f"{folder}:dev")


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("org/name", ("org/name", None, "train", None)),
        ("org/name:test[:10]", ("org/name", None, "test[:10]", None)),
        ("org/name:small/test", ("org/name", "small", "test", None)),
        ("org/name@abc123:small/test", ("org/name", "small", "test", "abc123")),
    ],
)
def test_a_hub_id_names_revision_configuration_and_split(monkeypatch, name, asked):
    calls = []

    def load_dataset(path, config, *, split, revision):
        calls.append((path, config, split, revision))
        return Dataset.from_list(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert load(name) == ROWS
    assert calls == [asked]


def test_a_folder_of_compressed_files_has_their_splits(tmp_path):
    lines = write_lines(tmp_path / "rows.jsonl").read_bytes()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train-0.jsonl").write_bytes(lines)
    (folder / "train-1.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "test.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "w9"}\n'))
    assert load(folder) == ROWS * 2
    assert load(folder, "test") == [{"prompt": "w9"}]
