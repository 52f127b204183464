"""The wheel in an empty folder: it has all files, and its commands run from anywhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import tomli_w

from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.paths import ROOT
from tests.helpers.slow_cases import slow

SHORT = ("ppo.total_episodes=128", "evaluation.num_examples=64", "reward_gate.num_prompts=8")
"""Settings of a short run of the built-in task."""

CHAMPION = """
from flows.champion import load_champion

champion = load_champion("rlhf-policy", cache="champions")
prompt = champion.tokenizer("title : first post here . tl;dr :", return_tensors="pt")
print(champion.version, champion.model.generate(**prompt).shape[0])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the code: a build leaves files beside the code."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("flows", "ppo_core"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(copy))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--target", str(folder), str(wheel))
    return folder


def pip(*words: str) -> None:
    options = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", *words, *options], check=True)


def run(installed: Path, folder: Path, *words: str) -> str:
    """What `python WORDS` prints in a folder that has no code, with the installed packages."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(installed),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
    }
    ran = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    return ran.stdout + ran.stderr


def test_the_wheel_has_every_file_of_the_packages(wheel: Path):
    expected = {
        str(path.relative_to(ROOT))
        for package in ("flows", "ppo_core")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"flows/gpus.toml", "flows/presets/tldr.toml", "ppo_core/py.typed"} < expected
    names = set(ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)


def test_the_installed_packages_are_imported(installed: Path, tmp_path: Path):
    code = "import flows, ppo_core; print(flows.__file__, ppo_core.__file__, sep='\\n')"
    for line in run(installed, tmp_path, "-c", code).splitlines():
        assert Path(line).is_relative_to(installed)


@pytest.mark.parametrize(
    "words", ["rlhf run", *slow("deploy", "registry show", "retrain run", "win_rate")]
)
def test_every_command_of_an_installed_copy_has_help(installed: Path, tmp_path: Path, words: str):
    assert "--help" in run(installed, tmp_path, "-m", "flows", *words.split(), "--help")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("run", "--total-episodes"),
        ("runs diff", "usage: python flows/runs.py diff"),
        ("registry show", "usage: python flows/registry.py show"),
        ("win-rate", "--num-examples"),
        ("feedback collect", "feedback.py collect"),
        ("deploy", "--create"),
    ],
)
def test_the_script_of_the_installation_runs_the_commands(
    installed: Path, tmp_path: Path, words: str, shown: str
):
    script = str(installed / "bin" / "rlhf")
    assert shown in run(installed, tmp_path, script, *words.split(), "--help")


def test_the_help_of_the_script_has_all_commands_in_groups_and_imports_no_library(
    installed: Path, tmp_path: Path
):
    script = str(installed / "bin" / "rlhf")
    shown = run(installed, tmp_path, "-X", "importtime", script, "--help")
    text = "".join(line for line in shown.splitlines(True) if "import time:" not in line)
    for name in "run check runs registry deploy win-rate feedback".split():
        assert re.search(rf"^  {name} +\w", text, re.M)
    assert re.findall(r"^(\w+):$", text, re.M) == ["Train", "Look", "Judge", "Production"]
    imported = set(re.findall(r"\| +(\w+)(?:\.|$)", shown, re.M))
    assert "flows" in imported
    assert not imported & {"torch", "mlflow", "metaflow", "rich", "pydantic", "ppo_core"}


def test_a_command_that_does_not_exist_is_answered_by_those_that_do(
    installed: Path, tmp_path: Path
):
    for words in ((), ("rhlf", "run")):
        ran = subprocess.run(
            [sys.executable, "-m", "flows", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 2
        assert "usage: rlhf COMMAND" in ran.stderr
        assert "  win-rate " in ran.stderr
        assert str(installed / "flows" / "presets") in ran.stderr


@pytest.mark.slow
def test_an_installed_flow_checks_inputs(installed: Path, tmp_path: Path):
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(tiny_table(tmp_path)))
    script = str(installed / "bin" / "rlhf")
    printed = run(installed, tmp_path, script, "check", "tiny.toml")
    assert "All checks passed." in printed


def test_an_installed_flow_packages_its_code_for_other_machines(installed: Path, tmp_path: Path):
    listed = run(installed, tmp_path, "-m", "flows", "rlhf", "package", "list", "--archive")
    names = {line.strip() for line in listed.splitlines()}
    assert {"rlhf.py", "gpus.toml", "presets/tldr.toml", "pipeline/stages/start.py"} < names
    assert ".mf_code/ppo_core/training/trainer.py" in names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installed_flow_runs_the_built_in_task_and_its_champion_is_loaded(
    installed: Path, tmp_path: Path
):
    changes = [word for change in SHORT for word in ("--set", change)]
    options = ("run", "--accept-reward-model", "--summary-json", "summary.json", *changes)
    run(installed, tmp_path, "-m", "flows", "rlhf", *options)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["promotion"]["version"] == 1
    promote = ("registry", "promote", "rlhf-policy", "1", "--reason", "a test")
    run(installed, tmp_path, "-m", "flows", *promote)
    assert "1 1" in run(installed, tmp_path, "-c", CHAMPION).splitlines()
