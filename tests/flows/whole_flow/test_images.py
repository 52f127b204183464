"""The Dockerfiles, as far as files can tell: what Metaflow needs to run a step in an image."""

import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

FILES = sorted((ROOT / "infra").glob("Dockerfile.*"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions and their arguments, without comments and with continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.split("\n"))]


def last_stage(path: Path) -> dict[str, str]:
    """The last value of each instruction of the image that is kept."""
    found = instructions(path)
    start = max(place for place, (word, _) in enumerate(found) if word == "FROM")
    return dict(found[start:])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_stage_starts_from_the_base_that_the_builder_may_replace(path: Path):
    found = instructions(path)
    word, base = found[0]
    assert word == "ARG"
    assert re.fullmatch(r"BASE=[\w./-]+:[\w.-]*\d[\w.-]*(@sha256:[0-9a-f]{64})?", base)
    assert [rest for word, rest in found if word == "FROM"] == ["${BASE} AS build", "${BASE}"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_python_is_that_of_the_project_and_metaflow_installs_nothing(path: Path):
    variables = dict(one.split("=", 1) for one in last_stage(path)["ENV"].split())
    assert variables["PATH"] == "/app/.venv/bin:$PATH"
    assert variables["METAFLOW_SKIP_INSTALL_DEPENDENCIES"] == "1"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_user_is_not_root_and_owns_the_working_directory(path: Path):
    image = last_stage(path)
    assert image["USER"] == "1000:1000"
    assert image["WORKDIR"] == "/app"
    assert "install --directory --owner rlhf --group rlhf /app" in path.read_text()


def test_the_working_directory_has_no_folder_metaflow():
    """Metaflow makes this folder in the working directory, and fails if there is one."""
    assert FILES
    assert not (ROOT / "metaflow").exists()
