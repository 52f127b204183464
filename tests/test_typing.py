"""What mypy and editors know of the public names, which are imported on first use."""

import os
import re
import subprocess
import sys

import pytest

import ppo_core
import ppo_core.classic
from tests.helpers.paths import ROOT

IMPORTS = """
import ppo_core
import ppo_core.classic
from flows.champion import load_champion
from ppo_core import ModelConfig, PPOConfig, PPOTrainer, ScriptArguments, SupervisedConfig

def trainer() -> PPOTrainer: raise SystemExit
def classic() -> ppo_core.classic.PPOTrainer: raise SystemExit
"""

WRONG = {
    "PPOConfig(learnig_rate=1)": '"learnig_rate"',
    "PPOConfig(learning_rate='fast')": 'incompatible type "str"; expected "float"',
    "PPOConfig().learnig_rate": 'no attribute "learnig_rate"',
    "ModelConfig(use_peff=True)": '"use_peff"',
    "ScriptArguments(dataset_nam='x')": '"dataset_nam"',
    "SupervisedConfig(batchsize=1)": '"batchsize"',
    "ppo_core.PPOTraner": 'no attribute "PPOTraner"',
    "ppo_core.load_policy(1)": 'incompatible type "int"',
    "PPOTrainer(PPOConfig(), polcy=1)": '"polcy"',
    "trainer().save_mdel('x')": 'no attribute "save_mdel"',
    "trainer().args.learnig_rate": 'no attribute "learnig_rate"',
    "ppo_core.classic.PPOConfig(mini_batch_sise=1)": '"mini_batch_sise"',
    "ppo_core.classic.LengthSampler('a', 2)": 'incompatible type "str"',
    "classic().steps([], [], [])": 'no attribute "steps"',
    "load_champion(1)": 'incompatible type "int"',
    "load_champion('x').tokeniser": 'no attribute "tokeniser"',
}
"""Line of a script -> part of the message about it."""

RIGHT = (
    "PPOConfig(learning_rate=1e-5, total_episodes=8)",
    "ppo_core.classic.PPOConfig(mini_batch_size=1)",
    "trainer().save_model('x')",
    "load_champion('x').model.generate()",
    *(f"ppo_core.{name}" for name in ppo_core.__all__),
    *(f"ppo_core.classic.{name}" for name in ppo_core.classic.__all__),
)

SETTINGS = """
[mypy]
strict = true
# Other packages are large, and are not tested here.
follow_imports = skip
[mypy-ppo_core.*,flows.*]
follow_imports = silent
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What mypy says of each line of a script; lines without a message are missing."""
    folder = tmp_path_factory.mktemp("typing")
    lines = [*IMPORTS.splitlines(), *WRONG, *RIGHT]
    (folder / "script.py").write_text("\n".join(lines) + "\n")
    (folder / "settings.ini").write_text(SETTINGS)
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "settings.ini", "script.py"],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"^script\.py:(\d+): error: (.*)$", ran.stdout, re.MULTILINE)
    assert found, ran.stdout + ran.stderr
    return {lines[int(number) - 1]: message for number, message in found}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_an_error(messages: dict[str, str], line: str):
    assert WRONG[line] in messages[line]


def test_a_right_line_is_none_and_every_public_name_is_known(messages: dict[str, str]):
    assert messages.keys() == WRONG.keys()


def test_the_packages_say_that_they_have_types():
    for package in ("flows", "ppo_core"):
        assert (ROOT / package / "py.typed").exists()


def test_the_public_names_exist():
    for name in ppo_core.__all__:
        assert getattr(ppo_core, name) is not None
