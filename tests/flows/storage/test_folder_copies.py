"""Encoded rows in S3: encoded once for all machines, and never taken if they are others."""

import shutil
from pathlib import Path

import pytest

from pipeline.storage import s3_client
from pipeline.storage.addresses import S3Address
from pipeline.storage.folder_copies import FolderCopies
from pipeline.storage.upload import publish
from pipeline.storage.workspace import Workspace
from ppo_core.data.rows.read_rows import LEAST_SHARED, Rows, derive, each, read_rows
from ppo_core.data.rows.row_columns import Row
from ppo_core.errors import StorageError
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.servers.s3_faults import S3Faults

STORE = "s3://artifacts/copies"


class Machine:
    """A machine with an empty disk, which doubles the prompts of a file."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", root / "cache")
        self.workspace = Workspace(str(root), store)
        self.converted = 0
        self.cache = root / "cache" / "ppo_core"

    def double(self, file: Path) -> Rows:
        def convert(row: Row) -> Row:
            self.converted += 1
            return {"prompt": row["prompt"] * 2}

        with self.workspace.sharing_rows():
            return derive(read_rows(str(file), "prompts"), "doubled", {}, each(convert))

    def doubled(self) -> Path:
        """The folder of the rows in the cache."""
        (folder,) = self.cache.glob("doubled-*")
        return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"prompt": f"w{number}"} for number in range(LEAST_SHARED)]
    return Path(write_rows(tmp_path / "rows.jsonl", rows))


def test_rows_are_encoded_once_for_all_machines(
    faults: S3Faults, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = Machine(tmp_path / "a", monkeypatch, f"{STORE}/once")
    made = first.double(file)
    assert first.converted == LEAST_SHARED
    second = Machine(tmp_path / "b", monkeypatch, f"{STORE}/once")
    found = second.double(file)
    assert second.converted == 0
    assert (found.digest, found.key) == (made.digest, made.key)
    assert found.column("prompt") == [f"w{n}w{n}" for n in range(LEAST_SHARED)]
    assert not [path for path in second.cache.iterdir() if path.name.startswith(".")]
    # A third machine without a store, and one with fewer rows.
    alone = Machine(tmp_path / "c", monkeypatch, "")
    alone.double(file)
    assert alone.converted == LEAST_SHARED


def test_few_rows_are_encoded_by_each_machine(
    faults: S3Faults, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file.write_text("".join(file.read_text().splitlines(True)[1:]))
    for name in "ab":
        machine = Machine(tmp_path / name, monkeypatch, f"{STORE}/few")
        machine.double(file)
        assert machine.converted == LEAST_SHARED - 1


def test_a_copy_with_other_bytes_is_never_used(
    faults: S3Faults, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = Machine(tmp_path / "a", monkeypatch, f"{STORE}/bytes")
    first.double(file)
    client = s3_client.s3_client()
    listed = client.list_objects_v2(Bucket="artifacts", Prefix="copies/bytes/")["Contents"]
    (key,) = [each["Key"] for each in listed if each["Key"].endswith("rows.arrow")]
    content = client.get_object(Bucket="artifacts", Key=key)["Body"].read()
    client.put_object(Bucket="artifacts", Key=key, Body=content.replace(b"w7w7", b"w8w8"))
    second = Machine(tmp_path / "b", monkeypatch, f"{STORE}/bytes")
    with pytest.raises(StorageError, match=r"rows.arrow' .*do not match its digest"):
        second.double(file)
    assert not [*second.cache.glob("*doubled-*")]


def test_the_copy_of_another_name_is_never_used(
    faults: S3Faults, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not even if its own digests are right."""
    first = Machine(tmp_path / "a", monkeypatch, "")
    first.double(file)
    place = S3Address.parse(f"{STORE}/foreign/cache/rows")
    other = tmp_path / "doubled-of-others"
    shutil.copytree(first.doubled(), other)
    made = other / "made.json"
    made.write_text(made.read_text().replace(first.doubled().name, other.name))
    publish(other, place.below(first.doubled().name))
    second = Machine(tmp_path / "b", monkeypatch, f"{STORE}/foreign")
    second.double(file)
    assert second.converted == LEAST_SHARED
    fetched = tmp_path / "b" / first.doubled().name
    FolderCopies(place).fetch(fetched)
    assert other.name in (fetched / "made.json").read_text()
