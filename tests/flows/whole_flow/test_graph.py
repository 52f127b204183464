"""The steps of the flow on one machine and on several."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.aws.state_machine import state_machines
from tests.helpers.runs.scheduled_flow import flow_command

ONE = (
    "start load_policy load_reward_model validate_reward_model train_policy evaluate_win_rate "
    "register end"
).split()

SEVERAL = (
    "start load_policy join_policy share_policy load_reward_model join_reward_model "
    "validate_reward_model train_policy join_trained evaluate_win_rate register end"
).split()


@pytest.mark.parametrize(("nodes", "steps"), [(1, ONE), (2, SEVERAL), (4, SEVERAL)])
def test_the_steps(nodes: int, steps: list[str], tmp_path: Path):
    shown = flow_command(tmp_path, "show", nodes=nodes)
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
    ended = flow_command(tmp_path, "run", "--check", *arguments, nodes=nodes)
    assert ended.returncode != 0
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    if arguments:
        assert "`num_nodes = 2` at the top of the settings file" in " ".join(ended.stderr.split())


@pytest.mark.parametrize(
    ("scheduler", "nodes", "message"),
    [
        ("airflow", 1, "airflow is not supported: the DAG that Metaflow writes has no settings"),
        ("airflow", 2, "airflow is not supported"),
        ("step-functions", 2, "num_nodes=2 is not possible with step-functions"),
    ],
)
def test_a_scheduler_that_cannot_run_the_flow_is_refused_at_once(
    scheduler: str, nodes: int, message: str, tmp_path: Path
):
    ended = flow_command(tmp_path, scheduler, "create", nodes=nodes)
    assert ended.returncode != 0
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Deploy with argo-workflows" in ended.stderr


def test_a_name_after_run_is_no_scheduler(tmp_path: Path):
    ended = flow_command(
        tmp_path, "run", "--check", "--registered-model", "airflow", "--seed", "-1"
    )
    assert "airflow is not supported" not in ended.stderr
    assert "seed=-1 must be at least 0" in ended.stderr


@pytest.mark.slow
def test_one_machine_compiles_for_step_functions(tmp_path: Path):
    """The code package is stored, and the state machine is printed in the place of deployed."""
    with state_machines() as machines:
        ended = flow_command(
            tmp_path, "step-functions", "create", "--only-json", variables=machines.variables
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    machine = json.loads(ended.stdout[ended.stdout.index("{") :])
    assert [*machine["States"]] == ONE
