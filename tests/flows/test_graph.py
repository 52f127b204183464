"""The steps of the flow on one machine and on several."""

import re
from pathlib import Path

import pytest

from tests.helpers.forked_python import run_python
from tests.helpers.paths import ROOT

ONE = (
    "start load_policy load_reward_model validate_reward_model train_policy evaluate_win_rate "
    "register end"
).split()

SEVERAL = (
    "start load_policy join_policy share_policy load_reward_model join_reward_model "
    "validate_reward_model train_policy join_trained evaluate_win_rate register end"
).split()


def flow(folder: Path, *arguments: str, nodes: object = 1):
    """Run the flow's command with a settings file."""
    (folder / "settings.toml").write_text(f'num_nodes = {nodes}\ntask = "tldr"\n')
    words = (ROOT / "flows" / "rlhf.py", "--config", "settings", folder / "settings.toml")
    return run_python(*words, *arguments)


@pytest.mark.parametrize(("nodes", "steps"), [(1, ONE), (2, SEVERAL), (4, SEVERAL)])
def test_the_steps(nodes: int, steps: list[str], tmp_path: Path):
    shown = flow(tmp_path, "show", nodes=nodes)
    assert re.findall(r"^Step (\w+)", shown.stdout + shown.stderr, re.MULTILINE) == steps


@pytest.mark.parametrize(
    ("arguments", "nodes", "message"),
    [
        (("--set", "num_nodes=2"), 1, "num_nodes=2 cannot be set by --set"),
        (("--num-nodes", "2"), 1, "no such option: --num-nodes"),
        ((), '"two"', "num_nodes='two'"),
        ((), 0, "num_nodes=0 must be at least 1"),
    ],
)
def test_a_number_of_machines_that_the_graph_cannot_have_is_refused(
    arguments: tuple[str, ...], nodes: object, message: str, tmp_path: Path
):
    ended = flow(tmp_path, "run", "--check", *arguments, nodes=nodes)
    assert ended.returncode != 0
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    if arguments:
        assert "Write it at the top of the settings file" in " ".join(ended.stderr.split())
