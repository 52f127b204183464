"""GPU and CPU seconds of the attempts of steps, from files of the run's folder."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.inputs.flow_run import FlowRun
from pipeline.launch import usage
from pipeline.launch.commands import FoundGpu
from pipeline.launch.usage import Attempt, attempts_of, gpu_hours, measured
from pipeline.storage.workspace import Workspace
from tests.helpers.paths import ROOT

WAIT = 0.2


@pytest.fixture
def run(tmp_path: Path) -> FlowRun:
    workspace = Workspace(folder=str(tmp_path))
    made = FlowRun(id="RLHF/7", workspace=workspace, tracking={}, origin={}, data=[])
    made.folder.mkdir(parents=True)
    return made


@pytest.fixture
def two_gpus(monkeypatch) -> None:
    found = (FoundGpu("NVIDIA L4", 24 * 10**9),) * 2
    monkeypatch.setattr(usage, "found_gpus", lambda: found)


def test_a_step_without_gpus_has_cpu_seconds_of_its_children_too(run: FlowRun):
    work = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with measured("load_policy", run, machines=1):
        subprocess.run([sys.executable, "-c", work], check=True)
    (attempt,) = attempts_of(run)
    assert (attempt.step, attempt.gpus, attempt.gpu_seconds) == ("load_policy", 0, 0)
    assert 0.3 <= attempt.cpu_seconds < 3
    assert attempt.seconds is not None
    assert attempt.seconds >= 0.3
    assert gpu_hours(run) == 0


@pytest.mark.usefixtures("two_gpus")
def test_the_gpus_of_all_machines_and_of_failed_attempts_count(run: FlowRun):
    with pytest.raises(OSError, match="spot"), measured("train_policy", run, machines=3):
        time.sleep(WAIT)
        raise OSError("spot")
    with measured("train_policy", run, machines=3):
        time.sleep(WAIT)
    first, second = attempts_of(run)
    assert first.gpu == second.gpu == "NVIDIA L4"
    seconds = (first.seconds or 0) + (second.seconds or 0)
    assert seconds >= 2 * WAIT
    assert gpu_hours(run) == pytest.approx(seconds * 2 * 3 / 3600)


def test_a_killed_attempt_lasts_until_the_next_one(run: FlowRun):
    """A process that is killed leaves its start only."""
    code = (
        "import os, signal, sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\n"
        "from pipeline.inputs.flow_run import FlowRun\n"
        "from pipeline.launch.usage import measured\n"
        "from pipeline.storage.workspace import Workspace\n"
        "run = FlowRun(id='RLHF/7', workspace=Workspace(folder=sys.argv[3]),\n"
        "              tracking={}, origin={}, data=[])\n"
        "with measured('train_policy', run, machines=1): os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(ROOT / "flows"), str(run.workspace.root)],
        check=False,
    )
    assert ended.returncode == -9
    (killed,) = attempts_of(run)
    assert killed.seconds is not None
    time.sleep(WAIT)
    with measured("train_policy", run, machines=1):
        pass
    first, second = attempts_of(run)
    assert first.seconds == pytest.approx(second.started - first.started)
    assert first.seconds >= WAIT


@pytest.mark.usefixtures("two_gpus")
def test_steps_do_not_end_each_other(run: FlowRun):
    for step, started in (("load_policy", 100.0), ("train_policy", 200.0), ("load_policy", 300.0)):
        attempt = Attempt(step=step, started=started, gpus=1)
        file = run.folder / "usage" / f"{step}-{started}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(vars(attempt)))
    first, second, third = attempts_of(run)
    assert first.seconds == 200.0
    # The others have not ended.
    assert second.seconds == pytest.approx(time.time() - 200, rel=1e-3)
    assert third.seconds == pytest.approx(time.time() - 300, rel=1e-3)
