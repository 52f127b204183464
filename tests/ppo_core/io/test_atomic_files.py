"""A file is replaced as a whole, on the disk, or not at all."""

import os
from pathlib import Path

import pytest

from ppo_core.io.atomic_files import replacing, write_atomically


def recorded_syncs(monkeypatch) -> list[tuple[str, bytes | None]]:
    """Names that are flushed to the disk, and what the target held then."""
    synced = []

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.append((path.name, path.read_bytes() if path.is_file() else None))

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


@pytest.mark.parametrize("content", ["grün\n", b"\xff\x00"], ids=["text", "bytes"])
def test_the_content_replaces_the_old_one_and_nothing_is_left_beside_it(content, tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    write_atomically(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_on_the_disk_before_the_name_and_then_the_name(tmp_path, monkeypatch):
    synced = recorded_syncs(monkeypatch)
    write_atomically(tmp_path / "file.json", "new")
    (hidden, content), (folder, _) = synced
    assert hidden.startswith(".file.json.") and content == b"new"
    assert folder == tmp_path.name


def test_a_file_that_need_not_outlive_a_power_cut_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    synced = recorded_syncs(monkeypatch)
    write_atomically(tmp_path / "file.json", "new", durable=False)
    assert (tmp_path / "file.json").read_text() == "new" and not synced


def test_a_block_that_fails_changes_nothing(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="no more"), replacing(path) as unfinished:
        unfinished.write_text("cut")
        raise ValueError("no more")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_error_names_the_file_although_its_folder_is_none(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        write_atomically(tmp_path / "file" / "child", "new")
    assert caught.value.filename == str(tmp_path / "file" / "child")


def test_the_old_content_stays_where_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    def fail(handle: int) -> None:
        raise OSError("The disk is full.")

    path = tmp_path / "file.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
