"""Folders of `save_to_disk` whose files lie outside of the folder."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from ppo_core.data.rows.read_rows import read_rows
from ppo_core.data.sources.source import open_source
from ppo_core.errors import DataError

DATA = "data-00000-of-00001.arrow"

Harm = Callable[[Path], object]


def names(*files: object, of: str = "state.json") -> Harm:
    """Name other data files in state.json."""

    def harm(folder: Path) -> None:
        state = json.loads((folder / of).read_text())
        (folder / of).write_text(json.dumps(state | {"_data_files": list(files)}))

    return harm


def name(file: str) -> Harm:
    return names({"filename": file})


def link(file: str) -> Harm:
    """Move a file out of the folder, and link to it."""

    def harm(folder: Path) -> None:
        (folder / file).rename(folder.parent / "outside")
        (folder / file).symlink_to(folder.parent / "outside")

    return harm


def link_below(folder: Path) -> None:
    (folder / "below").symlink_to(folder.parent / "secret")
    name(f"below/{DATA}")(folder)


def pipe(folder: Path) -> None:
    (folder / DATA).unlink()
    os.mkfifo(folder / DATA)


CASES: dict[str, tuple[Harm, str]] = {
    "a parent": (name(f"../secret/{DATA}"), "state.json"),
    "a parent behind a folder": (name(f"x/../../secret/{DATA}"), "state.json"),
    "an absolute name": (lambda folder: name(f"{folder.parent}/secret/{DATA}")(folder), "state"),
    "a root": (name("/etc/passwd"), "state.json"),
    "a home": (name("~/rows.arrow"), "state.json"),
    "a device": (name("/dev/zero"), "state.json"),
    "another process": (name("/proc/self/environ"), "state.json"),
    "a backslash": (name(f"..\\secret\\{DATA}"), "state.json"),
    "an address": (name("https://127.0.0.1:9/rows.arrow"), "state.json"),
    "an address of a file": (lambda f: name(f"file://{f.parent}/secret/{DATA}")(f), "state.json"),
    "nothing": (name(""), "state.json"),
    "the folder": (name("."), "state.json"),
    "the parent": (name(".."), "state.json"),
    "a zero": (name("a\0b"), "state.json"),
    "a second file": (names({"filename": DATA}, {"filename": f"../secret/{DATA}"}), "secret"),
    "a name that is a number": (names({"filename": 7}), "_data_files"),
    "a name that is a list": (names({"filename": [DATA]}), "_data_files"),
    "names without a key": (names(DATA), "_data_files"),
    "a link of the data": (link(DATA), DATA),
    "a link of the state": (link("state.json"), "state.json"),
    "a link of the description": (link("dataset_info.json"), "dataset_info.json"),
    "a link to a folder": (link_below, "below"),
    "a link to itself": (lambda folder: (folder / "x").symlink_to("x"), ""),
    "a pipe": (pipe, DATA),
}


def split(name: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", name]}))

    return harm


def link_of_split(folder: Path) -> None:
    (folder / "train").rename(folder.parent / "outside")
    (folder / "train").symlink_to("../outside")


def data_set_beside_splits(folder: Path) -> None:
    (folder / "dataset_dict.json").write_text('{"splits": []}')
    for file in ("state.json", "dataset_info.json"):
        shutil.copy(folder / "train" / file, folder / file)
    name(f"../secret/{DATA}")(folder)


DICT_CASES: dict[str, tuple[Harm, str]] = {
    "a split of a parent": (split("../secret"), "dataset_dict.json"),
    "a split of a root": (lambda f: split(f"{f.parent}/secret")(f), "dataset_dict.json"),
    "a split of an address": (split("file:///etc"), "dataset_dict.json"),
    "splits that are text": (
        lambda f: (f / "dataset_dict.json").write_text('{"splits": "../secret"}'),
        "splits",
    ),
    "a link of a split": (link_of_split, "train"),
    "a link in a split": (lambda f: link(f"train/{DATA}")(f), DATA),
    "a data set beside splits": (data_set_beside_splits, "state.json"),
    "a name in a split": (lambda f: name(f"../../secret/{DATA}")(f / "train"), "state.json"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Dataset.from_list([{"prompt": "secret"}]).save_to_disk(tmp_path / "secret")
    Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "one")
    DatasetDict(train=Dataset.from_list([{"prompt": "a"}])).save_to_disk(tmp_path / "several")
    return tmp_path


@pytest.mark.parametrize("case", [*CASES, *DICT_CASES])
def test_a_saved_folder_that_leads_out_is_refused_by_name(case: str, folder: Path):
    place = folder / ("one" if case in CASES else "several")
    harm, named = (CASES | DICT_CASES)[case]
    harm(place)
    with pytest.raises(DataError, match=re.escape(named)) as refused:
        open_source(str(place))
    assert str(place) in str(refused.value)


def test_links_within_a_saved_folder_and_to_it_are_followed(folder: Path):
    (folder / "one" / DATA).rename(folder / "one" / "rows")
    (folder / "one" / DATA).symlink_to("rows")
    (folder / "here").symlink_to(folder / "one")
    for name in ("one", "here", "several"):
        assert read_rows(str(folder / name), "prompts").column("prompt") == ["a"]
