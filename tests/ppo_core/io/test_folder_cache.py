import json
from pathlib import Path

import pytest

from ppo_core.io import folder_cache
from ppo_core.io.folder_cache import (
    digest_of,
    digest_of_file,
    digest_of_folder,
    link_or_copy,
    make_once,
)


def test_the_same_inputs_are_made_once(tmp_path: Path):
    calls = []

    def make(folder: Path) -> dict[str, float]:
        calls.append(folder)
        (folder / "file").write_text("content")
        return {"loss": 0.5}

    first = make_once(tmp_path, "sft", {"seed": 1}, make)
    second = make_once(tmp_path, "sft", {"seed": 1}, make)
    assert len(calls) == 1
    assert (first.reused, second.reused) == (False, True)
    assert first.path == second.path
    assert second.values == {"loss": 0.5}
    assert (second.path / "file").read_text() == "content"
    other = make_once(tmp_path, "sft", {"seed": 2}, make)
    assert other.path != first.path


def test_what_was_interrupted_is_made_again(tmp_path: Path):
    def stop(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path, "sft", {}, stop)
    assert list(tmp_path.iterdir()) == []
    made = make_once(tmp_path, "sft", {}, lambda folder: (folder / "whole").touch())
    assert sorted(path.name for path in made.path.iterdir()) == ["made.json", "whole"]


def test_the_warning_of_a_changed_folder_is_not_among_the_results(tmp_path: Path, capsys):
    made = make_once(tmp_path, "sft", {}, lambda folder: (folder / "whole").touch())
    (made.path / "whole").write_text("changed")
    assert not make_once(tmp_path, "sft", {}, lambda folder: (folder / "whole").touch()).reused
    shown = capsys.readouterr()
    assert "was changed after it was made" in shown.err
    assert not shown.out


def test_another_run_may_finish_first(tmp_path: Path):
    def make_both(folder: Path) -> dict[str, float]:
        final = tmp_path / folder.name[1:].rpartition(".")[0]
        final.mkdir()
        (final / folder_cache.MADE_FILE).write_text(
            json.dumps({"digest": "", "values": {"who": 1.0}})
        )
        return {"who": 2.0}

    made = make_once(tmp_path, "sft", {}, make_both)
    assert made.values == {"who": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == [made.path.name]


def test_a_new_version_of_a_library_makes_anew(tmp_path: Path, monkeypatch):
    first = make_once(tmp_path, "sft", {}, lambda folder: None)
    monkeypatch.setattr(folder_cache, "version", lambda library: "99")
    assert make_once(tmp_path, "sft", {}, lambda folder: None).path != first.path


def test_digests_tell_contents_and_names_apart(tmp_path: Path):
    (tmp_path / "a").write_text("1")
    first = digest_of_folder(tmp_path)
    (tmp_path / "a").write_text("2")
    second = digest_of_folder(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert len({first, second, digest_of_folder(tmp_path)}) == 3
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})


def test_a_file_is_read_again_only_if_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    path.write_text("one")
    first = digest_of_file(path)
    with monkeypatch.context() as patch:
        patch.setattr(folder_cache.hashlib, "file_digest", pytest.fail)
        assert digest_of_file(path) == first
    # Other files do not displace the digest.
    for number in range(200):
        (tmp_path / str(number)).touch()
        digest_of_file(tmp_path / str(number))
    with monkeypatch.context() as patch:
        patch.setattr(folder_cache.hashlib, "file_digest", pytest.fail)
        assert digest_of_file(path) == first
    path.unlink()
    path.write_text("two")
    assert digest_of_file(path) != first


def test_a_file_is_copied_where_no_hard_link_is_possible(tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("content")
    link_or_copy(str(one), str(other))
    assert one.samefile(other)
    # No link leads to another file system.
    link_or_copy("/proc/version", str(tmp_path / "version"))
    assert (tmp_path / "version").read_text() == Path("/proc/version").read_text()
    with pytest.raises(FileExistsError):
        link_or_copy("/proc/version", str(other))
    assert one.read_text() == "content"
