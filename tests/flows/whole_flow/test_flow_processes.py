"""The flow and the processes of its PPO step: several of them, killed, told to stop, resumed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import tomli_w
from safetensors.torch import load
from torch import Tensor
from torch.testing import assert_close

from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model
from tests.helpers.paths import ROOT
from tests.helpers.runs.flow_runs import step_logs

UPDATES = 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Run:
    """A run of the flow that goes on beside the test."""

    folder: Path
    scheduler: subprocess.Popen[bytes]
    log_file: Path

    def log(self) -> str:
        return self.log_file.read_text()

    def steps(self) -> str:
        """What the steps printed, as Metaflow's logs have it."""
        return "".join(step_logs(self.folder).values())

    def id(self) -> str:
        """Its number in Metaflow."""
        return re.findall(r"^Run (\d+)$", self.log(), re.M)[0]

    def pids(self, step: str) -> list[int]:
        """Ids of the processes of a step, the latest last."""
        return [int(pid) for pid in re.findall(rf" {step} \(pid (\d+)\)", self.log())]

    def task(self) -> psutil.Process:
        """The latest process of the PPO step."""
        return psutil.Process(self.pids("train_policy")[-1])

    def updates(self) -> list[int]:
        files = self.folder.glob(f"outputs/runs/*/ppo/{METRICS_FILE}")
        return [line["update"] for path in files for line in read_metrics(path)]

    def policy(self) -> bytes:
        (path,) = self.folder.glob("outputs/cache/policy-*/model.safetensors")
        return path.read_bytes()

    def weights(self) -> dict[str, Tensor]:
        return load(self.policy())

    def wait(self) -> int:
        return self.scheduler.wait()

    def wait_for_updates(self, count: int) -> None:
        self.wait_until(lambda: len(self.updates()) >= count)

    def finish_training(self) -> None:
        """Wait for the step after PPO; what follows is the business of other tests."""
        self.wait_until(lambda: self.pids("evaluate_win_rate"))
        self.stop()

    def stop(self) -> None:
        """Kill the scheduler and its tasks."""
        if self.scheduler.poll() is None:
            for process in psutil.Process(self.scheduler.pid).children(recursive=True):
                process.kill()
            self.scheduler.kill()
            self.wait()

    def wait_until(self, condition: Callable[[], object]) -> None:
        while not condition():
            assert self.scheduler.poll() is None, self.log()
            time.sleep(0.05)


def start(folder: Path, *arguments: str, name: str = "log") -> Run:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "OMP_"))
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
    }
    with (folder / name).open("wb") as log:
        scheduler = subprocess.Popen(
            [sys.executable, str(ROOT / "flows" / "rlhf.py"), *arguments],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return Run(folder, scheduler, folder / name)


def begin(folder: Path, *arguments: str, **settings: object) -> Run:
    """A run on tiny inputs from its first step on."""
    table = tiny_table(folder) | settings
    del table["sft_data"]
    table["reward_model"] = write_model(folder / "reward", labels=1)
    table["ppo"] |= {"total_episodes": 8 * UPDATES, "save_steps": 2}
    (folder / "tiny.toml").write_text(tomli_w.dumps(table))
    return start(folder, "--config", "settings", "tiny.toml", "run", *arguments)


class Undisturbed:
    """A run that nothing happens to, from whose PPO step others begin."""

    def __init__(self, folder: Path, *arguments: str, **settings: object) -> None:
        self.run = begin(folder, *arguments, accept_reward_model=True, **settings)
        assert self.run.wait() == 0, self.run.log()
        assert self.run.updates() == [*range(1, UPDATES + 1)]
        self.policy, self.weights = self.run.policy(), self.run.weights()
        self._begun: list[Run] = []

    def again(self) -> Run:
        """The same from the PPO step on, as if it had not been there."""
        for name in ("runs/*/ppo", "cache/policy-*"):
            for written in self.run.folder.glob(f"outputs/{name}"):
                shutil.rmtree(written)
        return self._start("train_policy", "--origin-run-id", self.run.id())

    def resumed(self, run: Run) -> Run:
        """What `resume` makes of a run that is over."""
        return self._start("--origin-run-id", run.id())

    def _start(self, *arguments: str) -> Run:
        name = f"log-{len(self._begun)}"
        self._begun.append(start(self.run.folder, "resume", *arguments, name=name))
        return self._begun[-1]

    def stop(self) -> None:
        """Stop what a failed test has left."""
        for run in self._begun:
            run.stop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("processes"), "--processes", "2")


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> Undisturbed:
    """On two machines, tasks of Metaflow that are both on this one, with a process each."""
    return Undisturbed(tmp_path_factory.mktemp("machines"), num_nodes=2)


@pytest.fixture(params=["undisturbed", "machines"])
def origin(request: pytest.FixtureRequest) -> Iterator[Undisturbed]:
    found = request.getfixturevalue(request.param)
    yield found
    found.stop()


def test_a_task_that_is_killed_is_tried_again_and_gives_the_same(origin: Undisturbed):
    run = origin.again()
    run.wait_for_updates(5)
    task = run.task()
    below = task.children(recursive=True)
    task.kill()
    assert psutil.wait_procs(below, timeout=10)[1] == []
    run.finish_training()
    assert "), retry: " in run.log()
    assert "Resumed from " in run.steps()
    assert run.updates() == [*range(1, UPDATES + 1)]
    assert run.policy() == origin.policy


def test_a_task_that_is_told_to_stop_saves_and_goes_on(origin: Undisturbed):
    run = origin.again()
    run.wait_for_updates(5)
    run.task().send_signal(signal.SIGTERM)
    run.finish_training()
    assert "The training stopped after SIGTERM" in run.log()
    assert "), retry: " in run.log()
    assert run.policy() == origin.policy


def test_a_run_whose_scheduler_was_killed_is_resumed(origin: Undisturbed):
    run = origin.again()
    run.wait_for_updates(5)
    task = run.task()
    run.scheduler.kill()
    run.wait()
    # Metaflow leaves the task: it may train on, until it writes to the scheduler that is gone.
    resumed = origin.resumed(run)
    resumed.finish_training()
    assert not task.is_running()
    assert "Resumed from " in resumed.steps()
    assert resumed.updates() == [*range(1, UPDATES + 1)]
    assert resumed.policy() == origin.policy


def test_an_error_that_a_further_attempt_would_not_mend_is_not_tried_again(tmp_path: Path):
    ppo = {"batch_size": 8, "response_length": 6, "kl_target": 1.0, "kl_horizon": 1}
    run = begin(tmp_path, accept_reward_model=True, ppo=ppo)
    assert run.wait() == 1
    assert "kl_horizon=1 is too short for 8 episodes" in run.log()
    assert run.log().count("The run stopped:") == 1
    assert "This failed task will not be retried." in run.log()
    assert "), retry: " not in run.log()


def test_two_machines_train_the_policy_that_two_processes_do(
    undisturbed: Undisturbed, machines: Undisturbed
):
    assert_close(machines.weights, undisturbed.weights, rtol=0, atol=1e-5)
