"""Records between steps: places on one disk, addresses on several."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.storage.workspace import Workspace, original_names, workspace_of
from ppo_core.errors import ConfigError
from tests.helpers.servers.s3_faults import S3Faults

INPUTS = {"policy": "policy", "preferences": "pairs", "prompts": "prompts", "judge": "rule"}


@dataclass(frozen=True)
class Made:
    FILE_FIELDS: ClassVar = ("path",)
    path: str
    text: str = ""
    inner: "Made | None" = None


def machine(root: Path, store: str = "s3://artifacts/workspace") -> Workspace:
    root.mkdir()
    return Workspace(str(root), store)


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def settings(**changes: str) -> Settings:
    return make_settings(INPUTS | changes, {})


def test_a_record_reaches_another_machine(faults: S3Faults, tmp_path: Path):
    first, second = machine(tmp_path / "a"), machine(tmp_path / "b")
    model = write_model(first.cache / "sft-1")
    text = "the text of a warning"
    shared = first.publish_files(Made(str(model), text, Made(str(model / "config.json"))))
    assert str(tmp_path) not in str(shared)
    assert shared.text == text
    found = second.fetch_files(shared)
    assert Path(found.path).is_relative_to(tmp_path / "b")
    assert (Path(found.path) / "model.safetensors").read_bytes() == b"weights"
    assert found.inner is not None and Path(found.inner.path).read_text() == "{}"
    # A stage may return several records, or none.
    assert first.publish_files((None, Made(str(model)))) == (None, Made(shared.path))
    # What was fetched has its address already.
    faults.received = 0
    assert second.publish_files(found) == shared
    assert faults.received == 0


def test_on_one_disk_nothing_changes(tmp_path: Path):
    workspace = machine(tmp_path / "a", "")
    record = Made(str(write_model(workspace.cache / "sft-1")))
    assert workspace.publish_files(record) is record
    assert workspace.fetch_files(record) is record
    assert workspace.find(workspace.cache / "sft-1") is None


def test_of_the_models_in_the_settings_no_weights_are_fetched(faults: S3Faults, tmp_path: Path):
    first, second = machine(tmp_path / "a"), machine(tmp_path / "b")
    policy = first.publish_input(write_model(tmp_path / "a" / "given"))
    (tmp_path / "judge.py").write_text("def judge(): ...")
    judge = f"python:{first.publish_input(tmp_path / 'judge.py')}:judge"
    found = second.fetch_files(settings(policy=policy, judge=judge))
    assert [path.name for path in Path(found.policy).iterdir()] == ["config.json"]
    kind, file, function = found.judge.split(":")
    assert (kind, Path(file).name, function) == ("python", "judge.py", "judge")
    assert original_names(found.judge) == judge
    full = second.fetch(policy)
    assert {path.name for path in Path(full).iterdir()} == {"config.json", "model.safetensors"}


def test_an_equal_input_is_stored_once(faults: S3Faults, tmp_path: Path):
    first, second = machine(tmp_path / "a"), machine(tmp_path / "b")
    addresses = [one.publish_input(write_model(one.root / "given")) for one in (first, second)]
    assert addresses[0] == addresses[1]


def test_the_pickled_workspace_has_no_path_of_its_machine(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workspace = Workspace("outputs", "s3://artifacts/workspace")
    assert workspace.root == tmp_path / "outputs"
    assert str(tmp_path).encode() not in pickle.dumps(workspace)


@pytest.mark.parametrize(
    ("variables", "store", "expected"),
    [
        ({}, "", ""),
        ({}, "s3://bucket/runs", "s3://bucket/runs"),
        ({"METAFLOW_DATASTORE_SYSROOT_S3": "s3://bucket/metaflow"}, "", ""),
        (
            {
                "METAFLOW_RUNTIME_ENVIRONMENT": "kubernetes",
                "METAFLOW_DATASTORE_SYSROOT_S3": "s3://bucket/metaflow/",
            },
            "",
            "s3://bucket/metaflow/rlhf",
        ),
        ({"METAFLOW_RUNTIME_ENVIRONMENT": "aws-batch"}, "none", ""),
    ],
)
def test_where_the_copy_is(variables: dict[str, str], store: str, expected: str, monkeypatch):
    for name in ("METAFLOW_RUNTIME_ENVIRONMENT", "METAFLOW_DATASTORE_SYSROOT_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert workspace_of(settings(store=store)).store == expected


def test_a_remote_run_without_a_store_is_refused(monkeypatch):
    monkeypatch.setenv("METAFLOW_RUNTIME_ENVIRONMENT", "kubernetes")
    monkeypatch.delenv("METAFLOW_DATASTORE_SYSROOT_S3", raising=False)
    with pytest.raises(ConfigError, match="Set store to an address s3://BUCKET/PREFIX"):
        workspace_of(settings())
    with pytest.raises(ConfigError, match="'somewhere' is not an address in S3"):
        workspace_of(settings(store="somewhere"))
