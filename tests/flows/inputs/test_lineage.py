"""Where a run comes from: real repositories, real packages."""

import hashlib
import os
import subprocess
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeline.inputs.lineage import UNKNOWN, git_state, installed_packages, trace
from ppo_core.data.rows.read_rows import read_rows

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
    return subprocess.run(
        ["git", *identity, *words],
        cwd=folder,
        env=CLEAN,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A file that is committed, two folders down in its repository."""
    file = tmp_path / "project" / "flows" / "code.py"
    file.parent.mkdir(parents=True)
    file.write_text("one = 1\n")
    project = file.parent.parent
    (project / "other.py").write_text("two = 2\n")
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "Begin")
    return file


def test_a_commit_without_changes(code: Path):
    assert git_state(code) == (git(code.parent, "rev-parse", "HEAD"), "no")


def test_a_change_anywhere_in_the_repository_is_said(code: Path):
    commit = git(code.parent, "rev-parse", "HEAD")
    (code.parent.parent / "other.py").write_text("two = 3\n")
    assert git_state(code) == (commit, "yes")
    git(code.parent, "add", "..")
    assert git_state(code) == (commit, "yes")


def test_files_that_git_does_not_know_are_no_changes(code: Path):
    (code.parent / "results.json").write_text("{}")
    assert git_state(code)[1] == "no"


def test_code_outside_of_a_repository_has_no_commit(tmp_path: Path):
    (tmp_path / "code.py").write_text("")
    assert git_state(tmp_path / "code.py") == (UNKNOWN, UNKNOWN)


def test_code_that_another_project_does_not_know_has_not_its_commit(code: Path):
    installed = code.parent / "site-packages" / "code.py"
    installed.parent.mkdir()
    installed.write_text("one = 1\n")
    assert git_state(installed) == (UNKNOWN, UNKNOWN)


def test_a_repository_without_a_commit_has_none(tmp_path: Path):
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("")
    git(tmp_path, "add", ".")
    assert git_state(tmp_path / "code.py") == (UNKNOWN, UNKNOWN)


def test_without_git_the_commit_is_unknown(code: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(code.parent))
    assert git_state(code) == (UNKNOWN, UNKNOWN)


def test_in_a_hook_of_another_repository_it_is_still_the_code_s_own(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    git(tmp_path, "init", "-q", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert git_state(code) == (git(code.parent, "rev-parse", "HEAD"), "no")


def test_every_package_is_listed_once_in_order():
    lines = installed_packages().splitlines()
    names = [line.partition("==")[0].lower() for line in lines]
    assert names == sorted(set(names))
    assert f"torch=={version('torch')}" in lines
    assert all(line.partition("==")[2] for line in lines)


def test_the_lineage_of_a_run(tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1"}\n{"prompt": "w2"}\n')
    rows = read_rows(str(tmp_path / "prompts.jsonl"), "prompts")
    secret = replace(
        rows,
        source="https://me:secret@host/pairs.jsonl",
        digest="3fa91c02",
        left_out={"with an empty prompt": 3},
    )
    settings = {"seed": 7, "ppo": {"kl_coef": 0.05}}

    def of(settings):
        return trace(
            flow_run="RLHF/17", settings=settings, data={"prompts": rows, "preferences": secret}
        )

    lineage = of(settings)
    digest = hashlib.sha256(lineage.packages.encode()).hexdigest()
    assert lineage.tags | {"python": "", "git_commit": "", "git_changes": ""} == {
        "flow_run": "RLHF/17",
        "git_commit": "",
        "git_changes": "",
        "python": "",
        "packages_digest": digest,
        "settings_digest": lineage.tags["settings_digest"],
        "seed": "7",
        "data/prompts": rows.digest,
        "data/preferences": "3fa91c02",
    }
    assert [(data.name, data.source, data.rows, data.left_out) for data in lineage.data] == [
        ("prompts", str(tmp_path / "prompts.jsonl"), 2, {}),
        ("preferences", "https://host/pairs.jsonl", 2, {"with an empty prompt": 3}),
    ]
    assert "secret" not in str(lineage)
    assert of(settings) == lineage
    other = of({"seed": 7, "ppo": {"kl_coef": 0.06}})
    assert other.tags["settings_digest"] != lineage.tags["settings_digest"]
