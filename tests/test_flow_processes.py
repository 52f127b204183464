"""The flow and the processes of its PPO step: several of them, killed, told to stop, resumed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from pipeline_inputs import as_toml, tiny_table, write_model

from ppo_core.metrics_file import METRICS_FILE, read_metrics

ROOT = Path(__file__).parent.parent
UPDATES = 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Run:
    """A run of the flow that goes on beside the test."""

    folder: Path
    scheduler: subprocess.Popen[bytes]
    log_file: Path

    def log(self) -> str:
        return self.log_file.read_text()

    def task(self) -> psutil.Process:
        """The latest process of the PPO step."""
        found = re.findall(r"/train_policy/\d+ \(pid (\d+)\)\] Task is starting", self.log())
        return psutil.Process(int(found[-1]))

    def updates(self) -> list[int]:
        files = self.folder.glob(f"outputs/runs/*/ppo/{METRICS_FILE}")
        return [line["update"] for path in files for line in read_metrics(path)]

    def policy(self) -> bytes:
        (path,) = self.folder.glob("outputs/runs/*/policy/model.safetensors")
        return path.read_bytes()

    def wait(self) -> int:
        return self.scheduler.wait()


def start(folder: Path, *arguments: str, name: str = "log", **settings: object) -> Run:
    if not (folder / "tiny.toml").exists():
        table = tiny_table(folder) | {"accept_reward_model": True, **settings}
        del table["sft_data"]
        table["reward_model"] = write_model(folder / "reward", labels=1)
        table["ppo"] |= {"total_episodes": 8 * UPDATES, "save_steps": 2}
        (folder / "tiny.toml").write_text(as_toml(table))
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "OMP_"))
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
    }
    if "resume" not in arguments:
        arguments = ("--config", "settings", "tiny.toml", "run", *arguments)
    with (folder / name).open("wb") as log:
        scheduler = subprocess.Popen(
            [sys.executable, str(ROOT / "flows" / "rlhf.py"), *arguments],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return Run(folder, scheduler, folder / name)


def wait_until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    run = start(tmp_path_factory.mktemp("undisturbed"), "--processes", "2")
    assert run.wait() == 0, run.log()
    assert run.updates() == [*range(1, UPDATES + 1)]
    return run


def test_a_task_that_is_killed_is_tried_again_and_gives_the_same(undisturbed: Run, tmp_path: Path):
    run = start(tmp_path, "--processes", "2")
    wait_until(lambda: len(run.updates()) >= 5)
    task = run.task()
    below = task.children(recursive=True)
    task.kill()
    assert psutil.wait_procs(below, timeout=10)[1] == []
    assert run.wait() == 0, run.log()
    assert "Task is starting (retry)" in run.log()
    assert "Resumed from " in run.log()
    assert run.updates() == [*range(1, UPDATES + 1)]
    assert run.policy() == undisturbed.policy()


def test_a_task_that_is_told_to_stop_saves_and_goes_on(undisturbed: Run, tmp_path: Path):
    run = start(tmp_path, "--processes", "2")
    wait_until(lambda: len(run.updates()) >= 5)
    run.task().send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.log()
    assert "SIGTERM: the training saved and stopped." in run.log()
    assert "Task is starting (retry)" in run.log()
    assert run.policy() == undisturbed.policy()


def test_a_run_whose_scheduler_was_killed_is_resumed(undisturbed: Run, tmp_path: Path):
    run = start(tmp_path, "--processes", "2")
    wait_until(lambda: len(run.updates()) >= 5)
    task = run.task()
    run.scheduler.kill()
    run.wait()
    # Metaflow leaves the task: it may train on, until it writes to the scheduler that is gone.
    resumed = start(tmp_path, "resume", name="resumed")
    assert resumed.wait() == 0, resumed.log()
    assert not task.is_running()
    assert "Resumed from " in resumed.log()
    assert resumed.updates() == [*range(1, UPDATES + 1)]
    assert resumed.policy() == undisturbed.policy()


def test_an_error_that_a_further_attempt_would_not_mend_is_not_tried_again(tmp_path: Path):
    run = start(tmp_path, accept_reward_model=False)
    assert run.wait() == 1
    assert run.log().count("The reward model is not fit to train against:") == 1
    assert "This failed task will not be retried." in run.log()
    assert "(retry)" not in run.log()


def test_two_machines_train_one_policy(tmp_path: Path):
    run = start(tmp_path, "--num-nodes", "2")
    assert run.wait() == 0, run.log()
    assert run.updates() == [*range(1, UPDATES + 1)]
    assert "Done!" in run.log()
