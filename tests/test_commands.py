"""The commands themselves: their help starts fast, and the package has its version and names."""

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import ppo_core
from tests.helpers.paths import ROOT

HELP = {
    "ppo": "-m ppo_core --help",
    "sft": "-m ppo_core.supervised sft --help",
    "reward": "-m ppo_core.supervised reward --help",
    "win_rate": "flows/win_rate.py --help",
    "registry": "flows/registry.py --help",
    "rlhf": "flows/rlhf.py run --help",
}

SLOW = {"torch", "datasets", "mlflow", "deepspeed", "accelerate", "openai", "statsmodels"}
"""Libraries whose import takes a second and more."""


@pytest.mark.parametrize("words", HELP.values(), ids=HELP)
def test_help_imports_no_slow_library_and_shows_no_placeholder(words: str, tmp_path: Path):
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", *words.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "USERNAME": "someone"},
        capture_output=True,
        text=True,
        check=True,
    )
    modules = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "ppo_core" in modules
    assert not modules & SLOW
    assert "--help" in ran.stdout
    assert "_MISSING_TYPE" not in ran.stdout


def refusal(*words: str, missing: str) -> str:
    """What a command prints on standard error if a package is not installed."""
    hide = f"import sys, runpy; sys.modules[{missing!r}] = None; sys.argv = {list(words)!r}; "
    run = (
        "sys.path.insert(0, 'flows'); runpy.run_path(sys.argv[0], run_name='__main__')"
        if words[0].endswith(".py")
        else "runpy.run_module(sys.argv[0], run_name='__main__')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", hide + run],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    return ran.stderr


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("flows/win_rate.py --model m --judge rule", "statsmodels", "evaluation"),
        ("flows/win_rate.py --model m --judge openai:m", "openai", "judge"),
        ("ppo_core --use_vllm --vllm_weights_dir weights", "openai", "vllm"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    command: str, missing: str, extra: str
):
    error = refusal(*command.split(), missing=missing)
    assert f"needs the package {missing}, which is not installed" in error
    assert f"pip install 'rlhf-flow[{extra}]'" in error
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(line.startswith(missing) for line in project["optional-dependencies"][extra])
    assert not any(line.startswith(missing) for line in project["dependencies"])


def test_make_installs_what_a_run_and_the_tests_need():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    assert "--editable '.[evaluation,judge]'" in makefile
    assert {*extras["evaluation"], *extras["judge"], *extras["vllm"], *extras["peft"]} <= {
        *extras["dev"]
    }


def test_the_package_lists_names_that_are_not_imported_yet():
    assert {*ppo_core.__all__, "__version__"} <= set(dir(ppo_core))


def test_the_package_is_typed_and_has_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "ppo_core.__version__"
    assert ppo_core.__version__.count(".") == 2
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["ppo_core"]
    assert (Path(find_spec("ppo_core").origin).parent / "py.typed").is_file()


@pytest.mark.parametrize("characters", [10, 1_000_000])
def test_a_command_whose_output_nobody_reads_ends_without_a_traceback(characters: int):
    program = (
        "from pipeline.settings.environment import run_and_exit; "
        f"run_and_exit(lambda words: print('x' * {characters}) or 0)"
    )
    ran = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "flows")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The command has not begun to write.
    ran.stdout.close()
    assert ran.stderr.read() == ""
    assert ran.wait() == 1


def test_a_broken_pipe_to_another_program_is_not_hidden():
    program = (
        "from pipeline.settings.environment import run_and_exit\n"
        "def main(words): raise BrokenPipeError('a server went away')\n"
        "run_and_exit(main)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "flows")])},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert "a server went away" in ran.stderr
