"""GPU and CPU seconds of the attempts of steps, from files of the run's folder."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.cost import usage
from pipeline.cost.usage import gpu_hours, measured, recorded_attempts
from pipeline.inputs.flow_run import FlowRun
from pipeline.launch.commands import FoundGpu
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


def test_a_damaged_file_is_left_out_with_a_warning(run: FlowRun, capsys):
    """It would else hide the error of a step, or fail a run that is already registered."""
    with measured("load_policy", run, machines=1):
        pass
    (run.folder / "usage" / "train_policy-1.000.json").write_text('{"step":')
    assert [one.step for one in recorded_attempts(run)] == ["load_policy"]
    assert gpu_hours(run) == 0
    told = capsys.readouterr().out
    assert "The cost of an attempt is not counted: " in told and "train_policy-1.000.json" in told


def test_a_step_without_gpus_has_cpu_seconds_of_its_children_too(run: FlowRun):
    work = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with measured("load_policy", run, machines=1):
        subprocess.run([sys.executable, "-c", work], check=True)
    (attempt,) = recorded_attempts(run)
    assert (attempt.step, attempt.gpus, attempt.gpu_seconds) == ("load_policy", 0, 0)
    assert 0.3 <= attempt.cpu_seconds < 3
    assert attempt.seconds >= 0.3
    assert gpu_hours(run) == 0


@pytest.mark.usefixtures("two_gpus")
def test_the_gpus_of_all_machines_and_of_failed_attempts_count(run: FlowRun):
    with pytest.raises(OSError, match="spot"), measured("train_policy", run, machines=3):
        time.sleep(WAIT)
        raise OSError("spot")
    with measured("train_policy", run, machines=3):
        time.sleep(WAIT)
    first, second = recorded_attempts(run)
    assert first.gpu == second.gpu == "NVIDIA L4"
    seconds = first.seconds + second.seconds
    assert seconds >= 2 * WAIT
    assert gpu_hours(run) == pytest.approx(seconds * 2 * 3 / 3600)


def test_a_cost_that_cannot_be_written_ends_no_step(run: FlowRun, capsys):
    (run.folder / usage.FOLDER).write_text("a file where the folder would be")
    with measured("load_policy", run, machines=1):
        done = True
    assert done
    assert "Warning: The cost of load_policy is not recorded: " in capsys.readouterr().out


@pytest.mark.usefixtures("two_gpus")
def test_a_killed_attempt_lasts_until_its_file_was_last_written(run: FlowRun):
    """A process that is killed writes no end."""
    code = (
        "import os, signal, sys, time; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\n"
        "from pipeline.inputs.flow_run import FlowRun\n"
        "from pipeline.cost import usage\n"
        "from pipeline.storage.workspace import Workspace\n"
        "usage.WRITE_SECONDS = 0.1\n"
        "run = FlowRun(id='RLHF/7', workspace=Workspace(folder=sys.argv[3]),\n"
        "              tracking={}, origin={}, data=[])\n"
        "with usage.measured('train_policy', run, machines=1):\n"
        "    time.sleep(1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(ROOT / "flows"), str(run.workspace.root)],
        check=False,
    )
    assert ended.returncode == -9
    (killed,) = recorded_attempts(run)
    assert 0.3 < killed.seconds < 5
    # The next attempt comes much later, and the time between them is nobody's.
    time.sleep(WAIT)
    with measured("train_policy", run, machines=1):
        pass
    first, second = recorded_attempts(run)
    assert first == killed
    assert second.started > first.started + first.seconds
    assert gpu_hours(run) == pytest.approx(2 * second.seconds / 3600)
