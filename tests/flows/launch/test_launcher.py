"""The processes of a training: started, followed, ended, and what is said of their end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.launch import process_tree
from pipeline.launch.commands import (
    THIS_MACHINE,
    Machines,
    command,
    environment_of,
    has_gpu_driver,
)
from pipeline.launch.failure import Ended, as_error
from pipeline.launch.forked_processes import ForkServer
from pipeline.launch.launcher import _end, _training_processes, train
from pipeline.launch.process_tree import FrozenProcesses, take_over
from ppo_core.distributed.process import ErrorReport
from ppo_core.distributed.torchrun import Failure, first_failure
from ppo_core.errors import ConfigError, ProcessError, RunInterruptedError
from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics
from tests.helpers.inputs.pipeline_inputs import write_ppo_inputs
from tests.helpers.paths import ROOT

CLOCKS = ("eps", "time/")
UPDATES = 12

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Job:
    """A training of a tiny policy, and where to find what it writes."""

    settings: Path

    @property
    def folder(self) -> Path:
        return self.settings.parent

    def updates(self) -> list[dict[str, float]]:
        """The metrics of every update, but for the clocks."""
        lines = read_metrics(self.folder / METRICS_FILE)
        return [{n: v for n, v in line.items() if not n.startswith(CLOCKS)} for line in lines]

    def policy(self) -> bytes:
        return (self.folder / "policy" / "model.safetensors").read_bytes()

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that train it, wherever they come from."""
        found = {}
        for process in psutil.process_iter():
            try:
                words, variables = process.cmdline(), process.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if str(self.settings) in words and "ppo_core.distributed.torchrun" not in words:
                found[int(variables.get("RANK", 0))] = process
        return found

    def wait_for(self, updates: int) -> None:
        wait_until(lambda: len(self.updates()) >= updates)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    return write_ppo_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def make_job(inputs: dict[str, str], tmp_path: Path) -> Callable[..., Job]:
    def make(name: str = "job", **changes: object) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        settings = {
            **inputs,
            "output_dir": str(folder),
            "policy_dir": str(folder / "policy"),
            "resume_from_checkpoint": "latest",
            "total_episodes": 8 * UPDATES,
            "batch_size": 8,
            "per_device_train_batch_size": 4,
            "response_length": 8,
            "learning_rate": 1e-3,
            "save_steps": 1,
            "save_total_limit": 2,
            "num_sample_generations": 0,
            "disable_tqdm": True,
            "use_cpu": True,
            **changes,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        return Job(folder / "settings.json")

    return make


@pytest.fixture(scope="module")
def whole(inputs: dict[str, str], tmp_path_factory) -> Job:
    """The job in one process that nothing happens to."""
    make = make_job.__wrapped__(inputs, tmp_path_factory.mktemp("whole"))
    job = make()
    train(job.settings, processes=1)
    assert len(job.updates()) == UPDATES
    return job


def wait_until(condition: Callable[[], object], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def after(condition: Callable[[], object], do: Callable[[], object]) -> threading.Thread:
    """Does something from a thread, as soon as something is the case."""

    def watch() -> None:
        wait_until(condition)
        do()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


class Launcher(subprocess.Popen[bytes]):
    """A process that does what the step of the flow does."""

    def __init__(self, job: Job, processes: int, machines: str = "Machines()") -> None:
        code = (
            "import sys; from pathlib import Path; "
            "from pipeline.launch.commands import Machines; "
            "from pipeline.launch.launcher import train; "
            f"train(Path(sys.argv[1]), processes={processes}, machines={machines})"
        )
        # A file takes what a pipe that nobody reads would not.
        self._log = job.folder / f"{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            super().__init__(
                [sys.executable, "-c", code, str(job.settings)],
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"},
                stderr=log,
            )

    def said(self) -> str:
        return self._log.read_text()


@pytest.fixture
def launch() -> Iterator[Callable[..., Launcher]]:
    """Starts launchers, and kills those that a failed test leaves."""
    started: list[Launcher] = []

    def begin(*given: Any) -> Launcher:
        started.append(Launcher(*given))
        return started[-1]

    yield begin
    for each in started:
        each.kill()
        each.wait()


# --- What ends a training, and how it goes on ------------------------------------------


@pytest.mark.slow
def test_a_killed_process_ends_all_of_them_and_is_named(make_job):
    job = make_job(total_episodes=8 * 500)
    pids = {}

    def kill() -> None:
        pids.update({rank: process.pid for rank, process in job.ranks().items()})
        os.kill(pids[1], signal.SIGKILL)

    killer = after(lambda: len(job.updates()) >= 3, kill)
    started = time.monotonic()
    with pytest.raises(ProcessError, match=r"^Process 1 \(pid \d+\) .* ended by SIGKILL") as error:
        train(job.settings, processes=2)
    killer.join()
    assert time.monotonic() - started < 60
    assert f"Process 1 (pid {pids[1]})" in str(error.value)
    assert not job.ranks()


@pytest.mark.slow
def test_the_next_attempt_goes_on_where_a_process_was_killed(make_job):
    job = make_job()
    killer = after(lambda: len(job.updates()) >= 3, lambda: job.ranks()[1].kill())
    with pytest.raises(ProcessError, match="ended by SIGKILL"):
        train(job.settings, processes=2)
    killer.join()
    seen = []
    train(job.settings, processes=2, on_metrics=lambda update, metrics: seen.append(update))
    assert job.policy()
    assert [line["update"] for line in job.updates()] == [*range(1, UPDATES + 1)]
    # What was there before the file was cut back is seen again, which the journal does not mind.
    assert seen[-UPDATES:] == [*range(1, UPDATES + 1)]


@pytest.mark.parametrize(
    ("exit_code", "kind"), [(75, None), (-signal.SIGTERM, "RunInterruptedError")]
)
def test_a_process_that_had_saved_before_it_was_ended_was_told_to_stop(tmp_path, exit_code, kind):
    report = kind and ErrorReport(kind=kind, message="stopped", traceback="", time=0.0)
    error = as_error(Ended(rank=0, pid=1, exit_code=exit_code, report=report), [], tmp_path)
    assert isinstance(error, RunInterruptedError)
    assert str(error).startswith("The training stopped after SIGTERM or after a notice")


@pytest.mark.slow
def test_sigterm_saves_and_the_next_attempt_gives_the_same(make_job, whole: Job):
    job = make_job(save_steps=500)
    after(lambda: len(job.updates()) >= 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(RunInterruptedError, match="The training stopped after SIGTERM"):
        train(job.settings, processes=1)
    assert not job.ranks()
    assert 3 <= len(job.updates()) < UPDATES
    assert [*job.folder.glob("checkpoint-*")]
    train(job.settings, processes=1)
    assert job.policy() == whole.policy()
    assert job.updates() == whole.updates()


@pytest.mark.slow
def test_a_forked_training_is_interrupted_and_gives_the_same(make_job, whole: Job, monkeypatch):
    server = ForkServer.start(["ppo_core.training.cli"])
    monkeypatch.setattr(ForkServer, "of_this_process", server)
    job = make_job(save_steps=500)
    after(lambda: len(job.updates()) >= 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(RunInterruptedError, match="The training stopped after SIGTERM"):
        train(job.settings, processes=1)
    assert 3 <= len(job.updates()) < UPDATES
    train(job.settings, processes=1)
    server.close()
    assert job.policy() == whole.policy()
    assert job.updates() == whole.updates()


# As soon as they are there, and while they train.
@pytest.mark.parametrize("updates", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_no_orphan_is_left_by_a_launcher_that_is_killed(make_job, launch, updates: int):
    job = make_job()
    step = launch(job, 2)
    wait_until(lambda: len(job.updates()) >= updates and sorted(job.ranks()) == [0, 1])
    step.kill()
    step.wait()
    wait_until(lambda: not job.ranks(), seconds=10)


@pytest.mark.slow
def test_a_further_attempt_ends_the_one_that_still_runs(make_job, launch, whole: Job):
    job = make_job(save_steps=500)
    step = launch(job, 1)
    job.wait_for(3)
    train(job.settings, processes=1)
    step.wait()
    assert "The training stopped after SIGTERM" in step.said()
    assert job.updates() == whole.updates()
    assert job.policy() == whole.policy()


@pytest.mark.slow
def test_a_frozen_process_ends_the_training_in_under_a_minute(make_job):
    job = make_job()
    stopped = []

    def stop() -> None:
        job.ranks()[1].suspend()
        stopped.append(time.monotonic())

    after(lambda: len(job.updates()) >= 3, stop)
    with pytest.raises(ProcessError, match=r"^Process 1 \(pid \d+\) of the training was frozen"):
        train(job.settings, processes=2)
    assert time.monotonic() - stopped[0] < 60
    assert not job.ranks()


@pytest.mark.slow
def test_a_reward_function_that_never_returns_ends_the_training_with_its_stack(tmp_path):
    job = tmp_path / "settings.json"
    program = ("tests.helpers.jobs.hanging_job",)
    with pytest.raises(ProcessError, match=r"no progress for 0\.5 minutes") as error:
        train(job, processes=1, program=program, stall_minutes=0.5)
    assert len(read_metrics(tmp_path / METRICS_FILE)) == 2
    stacks = tmp_path / "stacks-0.txt"
    assert str(stacks) in str(error.value)
    assert "in sleepy_reward" in stacks.read_text()
    assert not [each for each in psutil.Process().children(recursive=True) if is_training(each)]


def is_training(process: psutil.Process) -> bool:
    return "tests.helpers.jobs.hanging_job" in process.cmdline()


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_machines_that_begin_one_after_the_other_train_one_policy(make_job, launch, first: int):
    job = make_job()
    begun = []
    for index in (first, 1 - first):
        begun.append(launch(job, 1, f"Machines(count=2, index={index})"))
        time.sleep(10)
    assert [each.wait() for each in begun] == [0, 0], [each.said() for each in begun]
    assert job.policy()
    assert [line["update"] for line in job.updates()] == [*range(1, UPDATES + 1)]
    # torchrun leaves nothing beside the job.
    assert [*job.folder.parent.iterdir()] == [job.folder]


@pytest.mark.slow
def test_machines_end_together(make_job, launch):
    job = make_job(total_episodes=8 * 500)
    begun = [launch(job, 1, f"Machines(count=2, index={index})") for index in (0, 1)]
    job.wait_for(3)
    job.ranks()[1].kill()
    killed = time.monotonic()
    assert [each.wait() for each in begun] == [1, 1]
    assert time.monotonic() - killed < 60
    assert not job.ranks()
    assert sum("was ended by SIGKILL" in each.said() for each in begun) == 1


# --- What is said ---------------------------------------------------------------------


def test_what_a_process_refuses_is_said_as_it_was_raised(make_job):
    job = make_job(response_length=-1)
    with pytest.raises(ConfigError, match=r"^response_length=-1"):
        train(job.settings, processes=1)


def test_the_traceback_of_the_process_that_failed_first_is_on_top(tmp_path: Path, monkeypatch):
    # In the place of ppo_core's own command: the second process fails, the first one of that.
    package = tmp_path / "code" / "failing"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(
        "import os, pathlib, sys, time\n"
        "from ppo_core.distributed.process import end_with_parent, reported_errors\n"
        "end_with_parent()\n"
        "reason = pathlib.Path(sys.argv[1]).parent / 'reason'\n"
        "if os.environ['RANK'] == '1':\n"
        "    try:\n"
        "        with reported_errors():\n"
        "            time.sleep(0.5)\n"
        "            raise ZeroDivisionError('the first error')\n"
        "    finally:\n"
        "        reason.touch()\n"
        "with reported_errors():\n"
        "    while not reason.exists():\n"
        "        time.sleep(0.05)\n"
        "    raise ConnectionError('what follows from it')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    job = tmp_path / "settings.json"
    words = command(job, 2, Machines())
    words[words.index("ppo_core")] = "failing"
    monkeypatch.setattr("pipeline.launch.launcher.command", lambda *given: words)
    with pytest.raises(ProcessError) as error:
        train(job, processes=2)
    said = str(error.value)
    assert said.startswith("Traceback (most recent call last):\n")
    assert "ZeroDivisionError: the first error\nProcess 1 (pid" in said
    assert "ConnectionError" not in said


def failure(rank: int, exit_code: int, says: str | None = None) -> Failure:
    report = says and ErrorReport(kind=says, message="", traceback="", time=0.0)
    return Failure(rank=rank, pid=100 + rank, exit_code=exit_code, report=report or None)


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        # The earlier of two errors.
        ([(failure(0, 1), 10.4), (failure(1, 1), 10.2)], 1),
        # A death that was noticed a second after what follows from it.
        ([(failure(0, 1), 10.0), (failure(1, -9), 11.0)], 1),
        # torchrun kills what has not ended half a minute after an error.
        ([(failure(0, 1), 10.0), (failure(1, -9), 40.0)], 0),
        # It tells the others to end, and gloo's threads may abort.
        ([(failure(0, 1), 10.0), (failure(1, -15), 11.0)], 0),
        ([(failure(0, 1), 10.0), (failure(1, -6), 11.0)], 0),
        # An end without a report has the second in which it was noticed, not the moment.
        ([(failure(0, -15), 10.0), (failure(1, 1, says="ZeroDivisionError"), 10.9)], 1),
    ],
)
def test_the_first_failure_is_the_one_that_the_others_follow_from(failures, first: int):
    assert first_failure(failures).rank == first


# --- How they are started -------------------------------------------------------------


def test_the_process_that_starts_them_does_without_torch():
    code = "import sys; import pipeline.launch.launcher; assert 'torch' not in sys.modules"
    search = {"PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"}
    subprocess.run([sys.executable, "-c", code], env=os.environ | search, check=True)


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl", "kfd", "dxg"])
def test_a_gpu_is_looked_for_where_a_driver_is(tmp_path: Path, name: str):
    (tmp_path / "nvidia").touch()
    assert not has_gpu_driver(tmp_path)
    (tmp_path / name).touch()
    assert has_gpu_driver(tmp_path)


def test_one_process_needs_no_torchrun(tmp_path: Path):
    job = tmp_path / "settings.json"
    assert command(job, 1, Machines()) == [sys.executable, "-m", "ppo_core", str(job)]
    assert "ppo_core.distributed.torchrun" in command(job, 2, Machines())


def test_machines_meet_at_the_first_one_at_a_port_of_their_attempt(tmp_path: Path):
    def words(run: str, index: int, attempt: str = "1") -> dict[str, str]:
        here = Machines(count=2, index=index, main_address="10.0.0.7", attempt=attempt)
        given = command(tmp_path / run / "settings.json", 1, here)
        return dict(word.split("=", 1) for word in given if word.startswith(("--rdzv", "--node")))

    first, second = words("a", 0), words("a", 1)
    assert (first["--node-rank"], second["--node-rank"]) == ("0", "1")
    assert first["--rdzv-conf"] == second["--rdzv-conf"] == "timeout=600"
    assert first["--rdzv-endpoint"].startswith("10.0.0.7:")
    # Another run and another attempt meet under another name, at another port.
    others = [first, words("b", 0), words("a", 0, attempt="2")]
    for name in ("--rdzv-endpoint", "--rdzv-id"):
        assert first[name] == second[name]
        assert len({each[name] for each in others}) == 3


@pytest.mark.parametrize(
    ("given", "processes", "machines", "threads"),
    [
        (None, 2, Machines(), "4"),
        ("2", 2, Machines(), "2"),
        ("8", 2, Machines(), "4"),
        (None, 3, Machines(), "2"),
        (None, 16, Machines(), "1"),
        (None, 2, Machines(count=2), "2"),
        (None, 2, Machines(count=2, main_address="10.0.0.7"), "4"),
        (None, 1, Machines(), None),
        ("", 2, Machines(), "4"),
        ("3,2", 2, Machines(), "3"),
        ("0", 2, Machines(), "4"),
    ],
)
def test_the_cores_are_divided(
    tmp_path: Path, monkeypatch, given: str | None, processes: int, machines: Machines, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    environment = environment_of(processes, machines, tmp_path / "reason")
    assert environment.get("OMP_NUM_THREADS") == threads
    assert Machines().main_address == THIS_MACHINE


def test_a_further_machine_here_does_not_begin_without_the_first_one(tmp_path: Path):
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from pipeline.launch.commands import Machines\n"
        "from pipeline.launch.launcher import train\n"
        "first = os.getpid()\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "while os.getppid() == first:\n"
        "    time.sleep(0.01)\n"
        "train(Path(sys.argv[1]), processes=1, machines=Machines(count=2, index=1))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "settings.json")],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "ProcessError: The task of the first machine ended before this task" in ran.stderr
    assert not [*tmp_path.iterdir()]


# --- The tree of processes ------------------------------------------------------------


def test_a_process_that_has_ended_needs_no_signal():
    with subprocess.Popen(["true"]) as child:
        process = psutil.Process(child.pid)
    for end in (process_tree.terminate, process_tree.kill):
        end([process])


@pytest.mark.parametrize("rank", ["RANK=0", ""], ids=["torchrun", "one process"])
def test_what_a_reward_function_starts_is_no_process_of_the_training(rank: str):
    # The shells stand for torchrun, a process of the training, and what a reward function starts.
    lines = [f"{rank} sh -c 'sleep 60 & wait' & wait", "sleep 60 & wait"]
    with subprocess.Popen(["sh", "-c", lines[0 if rank else 1]]) as root:
        wait_until(lambda: len(process_tree.tree(root.pid)) == (3 if rank else 2))
        found, everything = _training_processes(root.pid), process_tree.tree(root.pid)
        process_tree.kill(everything)
    assert found == [everything[1 if rank else 0]]


def test_a_process_is_frozen_when_it_was_stopped_at_every_one_of_some_looks(monkeypatch):
    monkeypatch.setattr(process_tree, "FROZEN_LOOKS", 3)
    with subprocess.Popen(["sleep", "60"]) as child:
        process, watch = psutil.Process(child.pid), FrozenProcesses(child.pid)
        assert watch.look() == []
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
        assert watch.look() == watch.look() == []
        assert watch.look() == [process]
        process.resume()
        wait_until(lambda: process.status() != psutil.STATUS_STOPPED)
        assert watch.look() == []
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
        assert watch.look() == []
        child.kill()


def test_a_stranger_that_has_the_number_of_an_ended_training_is_left_alone():
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert child.wait() == 3
    with subprocess.Popen(["sleep", "60"]) as stranger:
        child.pid = stranger.pid
        assert _end(child) == 3
        assert stranger.poll() is None
        stranger.kill()


def test_a_process_that_has_the_number_of_an_earlier_attempt_is_left_alone(tmp_path: Path):
    record = tmp_path / "launcher.json"
    take_over(record)
    written = json.loads(record.read_text())
    assert written["pid"] == os.getpid()
    with subprocess.Popen(["sleep", "60"]) as other:
        record.write_text(json.dumps({**written, "pid": other.pid, "started": 1.0}))
        take_over(record)
        assert other.poll() is None
        started = psutil.Process(other.pid).create_time()
        record.write_text(json.dumps({**written, "pid": other.pid, "started": started}))
        take_over(record)
        assert not psutil.pid_exists(other.pid)
