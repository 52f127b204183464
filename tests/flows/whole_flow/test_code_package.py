"""The code package that Metaflow sends to other machines: all it needs, and nothing secret."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.runs.canaries import CANARY, VARIABLES

CANARIES = (
    ".env",
    ".ssh/id_rsa",
    "credentials",
    "id_rsa",
    "mlflow.db",
    "my-settings.toml",
    "outputs/models/model.safetensors",
    "prompts.jsonl",
)
"""Files with a secret, beside the flow and in each of its folders."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code with canaries in every folder that could be packaged."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("flows", "ppo_core"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (".", "flows", "flows/pipeline", "flows/presets", "ppo_core", "ppo_core/data"):
        # A .toml beside the presets is one of them.
        for name in CANARIES if folder != "flows/presets" else ("id_rsa", ".env"):
            path = copy / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{CANARY} in {name}")
    return copy


def package(project: Path, *words: str) -> str:
    """What the command `package WORDS` of the copied flow prints."""
    ran = subprocess.run(
        [sys.executable, "flows/rlhf.py", "package", *words],
        cwd=project,
        env={**os.environ, **VARIABLES, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def names(project: Path) -> set[str]:
    """Paths in the package, without those of Metaflow."""
    listed = package(project, "list", "--archive").splitlines()
    paths = listed[listed.index(next(line for line in listed if line.startswith("Files"))) + 1 :]
    return {path for path in paths if not path.startswith(".mf_code/metaflow/")}


@pytest.fixture(scope="module")
def contents(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """All files in the package by their path."""
    archive = tmp_path_factory.mktemp("package") / "package.tar"
    package(project, "save", str(archive))
    with tarfile.open(archive) as tar:
        return {one.name: file.read() for one in tar if (file := tar.extractfile(one))}


def test_the_package_has_every_module_and_every_preset_and_no_other_file(names: set[str]):
    flows, core = ROOT / "flows", ROOT / "ppo_core"
    modules = {str(path.relative_to(flows)) for path in flows.rglob("*.py")}
    modules |= {f".mf_code/{path.relative_to(ROOT)}" for path in core.rglob("*.py")}
    presets = {f"presets/{path.name}" for path in flows.glob("presets/*.toml")}
    assert len(modules) > 300 and len(presets) == 8
    # Again, as the modules of the flow's decorators.
    modules |= {f".mf_code/{name}.py" for name in ("__mp_main__", "flow_parts", "step_wrapper")}
    metaflow = {".mf_install", *(f".mf_meta/{name}" for name in ("INFO", "CONFIG", "DIST_INFO"))}
    assert names == modules | presets | {"gpus.toml"} | metaflow


def test_the_presets_are_packaged_as_they_are(contents: dict[str, bytes]):
    for path in (ROOT / "flows" / "presets").glob("*.toml"):
        assert contents[f"presets/{path.name}"] == path.read_bytes()


def test_no_secret_is_packaged(contents: dict[str, bytes]):
    assert "rlhf.py" in contents
    assert [name for name, content in contents.items() if CANARY.encode() in content] == []
    secret = {Path(name).name for name in CANARIES}
    assert [name for name in contents if Path(name).name in secret] == []
