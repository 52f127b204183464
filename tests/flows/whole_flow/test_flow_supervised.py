"""Whole runs whose SFT is killed, on two machines, and with a judge that hangs."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import tomli_w

from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics
from tests.flows.whole_flow.test_flow_processes import Run, start
from tests.helpers.inputs.pipeline_inputs import tiny_table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HANGING_JUDGE = """
import time
from metaflow import current

def judge(prompts, pairs):
    if current.step_name == "evaluate_win_rate":
        time.sleep(3600)
    return ["first" if len(a) > len(b) else "second" for a, b in pairs]
"""


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Run]:
    """Return a function that begins a run on tiny inputs."""

    def with_settings(**changes: object) -> Run:
        table = tiny_table(tmp_path) | {"accept_reward_model": True} | changes
        (tmp_path / "tiny.toml").write_text(tomli_w.dumps(table))
        return start(tmp_path, "--config", "settings", "tiny.toml", "run")

    return with_settings


@pytest.mark.parametrize("spread", [{"processes": 1}, {"processes": 2}, {"num_nodes": 2}])
def test_sft_that_is_killed_is_retried_and_resumes(
    begin: Callable[..., Run], tmp_path: Path, spread: dict[str, int]
):
    training = {"batch_size": 2, "max_length": 32, "learning_rate": 1e-3}
    sft = training | {"num_epochs": 60, "save_steps": 20}
    run = begin(**spread, sft=sft, reward_model_training=training)

    def lines() -> list[dict[str, float]]:
        files = tmp_path.glob(f"outputs/runs/*/sft/{METRICS_FILE}")
        return [line for file in files for line in read_metrics(file)]

    run.wait_until(lambda: len(lines()) > 50)
    step = psutil.Process(run.pids("load_policy")[-1])
    descendants = step.children(recursive=True)
    parents = {one.ppid() for one in descendants}
    # A training has no children, and neither have the fork server of the step, which is older, and
    # the programs that write cards.
    trained = [
        one
        # A program of a card that has just ended is a zombie without a command line.
        for one in psutil.process_iter(["cmdline", "status"])
        if one in descendants
        and one.pid not in parents
        and one.info["status"] != psutil.STATUS_ZOMBIE
        and "card" not in (one.info["cmdline"] or [])
    ]
    max(trained, key=psutil.Process.create_time).kill()
    run.wait_until(lambda: run.pids("validate_reward_model"))
    run.stop()
    assert "was ended by SIGKILL" in run.log()
    assert "), retry: " in run.log()
    assert "Resumed from " in run.steps()
    # The checkpoints of a finished training are removed.
    assert not [*tmp_path.glob("outputs/runs/*/sft")]
    assert [*tmp_path.glob("outputs/cache/sft-*/model.safetensors")]


def test_two_machines_train_the_same_models_as_two_processes(
    begin: Callable[..., Run], tmp_path: Path
):
    def train(**spread: int) -> dict[str, bytes]:
        run = begin(judge="", **spread)
        assert run.wait() == 0, run.log()
        files = tmp_path.glob("outputs/cache/*/model.safetensors")
        trained = {file.parent.name: file.read_bytes() for file in files}
        shutil.rmtree(tmp_path / "outputs")
        return trained

    machines = train(num_nodes=2)
    assert len(machines) == 4
    assert machines == train(processes=2)


def test_a_judge_that_hangs_ends_the_run_and_nothing_is_registered(
    begin: Callable[..., Run], tmp_path: Path
):
    run = begin(stall_minutes=0.25)
    (tmp_path / "judge.py").write_text(HANGING_JUDGE)
    assert run.wait() == 1
    assert "made no progress for 0.25 minutes (stall_minutes=0.25)" in run.log()
    (stacks,) = tmp_path.glob("outputs/runs/*/stacks-evaluate_win_rate.txt")
    assert "in judge" in stacks.read_text()
    (page,) = tmp_path.glob("outputs/runs/*/index.html")
    assert "evaluate_win_rate failed: " in page.read_text()
    assert not run.pids("register")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("select count(*) from model_versions").fetchone() == (0,)
