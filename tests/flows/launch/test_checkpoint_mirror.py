"""Trainings whose machines share nothing but S3, and machines that are lost with their folders."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import boto3
import psutil
import pytest

from pipeline.launch.checkpoint_mirror import mirrored
from pipeline.launch.commands import Machines
from pipeline.storage.s3_client import s3_client
from pipeline.storage.workspace import Workspace
from ppo_core.errors import ConfigError
from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics
from tests.helpers.inputs.pipeline_inputs import write_ppo_inputs
from tests.helpers.paths import ROOT
from tests.helpers.servers.servers import BUCKET, s3

UPDATES = 30

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    with s3() as environment:
        yield environment


@pytest.fixture
def here_store(store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The store, with its environment in this process."""
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    s3_client.cache_clear()
    yield store
    s3_client.cache_clear()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    return write_ppo_inputs(tmp_path_factory.mktemp("inputs"))


def lose(process: subprocess.Popen[bytes], machine: "Machine") -> None:
    """Take a machine away: its processes are killed, and its folder is gone."""
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        each.send_signal(signal.SIGKILL)
    process.wait()
    shutil.rmtree(machine.root)


def copied(store: dict[str, str], place: str) -> set[str]:
    """The names of the checkpoints of a machine that are completely in S3."""
    client = boto3.client(
        "s3",
        endpoint_url=store["AWS_ENDPOINT_URL_S3"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    try:
        reply = client.get_object(Bucket=BUCKET, Key=f"{place}/manifest.json")
    except client.exceptions.NoSuchKey:
        return set()
    names = json.loads(reply["Body"].read())["files"]
    return {name.split("/")[0] for name in names if name.startswith("checkpoint-")}


def wait_for_copies(store: dict[str, str], place: str, step: int) -> None:
    end = time.monotonic() + 240
    while not any(int(name.split("-")[1]) >= step for name in copied(store, place)):
        assert time.monotonic() < end, "no checkpoint was copied in time"
        time.sleep(0.05)


class Machine:
    """A machine with a folder of its own."""

    def __init__(self, root: Path, inputs: dict[str, str], store: dict[str, str]) -> None:
        self.folder, self.store = root / "ppo", store
        self.settings = {
            **inputs,
            "output_dir": str(self.folder),
            "policy_dir": str(root / "policy"),
            "resume_from_checkpoint": "latest",
            "total_episodes": 8 * UPDATES,
            "batch_size": 8,
            "per_device_train_batch_size": 2,
            "response_length": 8,
            "learning_rate": 1e-3,
            "save_steps": 5,
            "save_total_limit": 2,
            "save_policies": 2,
            "num_sample_generations": 3,
            "watched_prompts": 2,
            "disable_tqdm": True,
            "use_cpu": True,
        }
        self.log = root.with_suffix(".log")
        self.root = root

    def start(self, index: int, count: int, attempt: int, prefix: str) -> subprocess.Popen[bytes]:
        """Start the processes of this machine; an empty prefix copies nothing to S3."""
        words = [sys.executable, "-m", "tests.helpers.jobs.machine_job", json.dumps(self.settings)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*words, str(index), str(count), str(attempt), prefix],
                cwd=ROOT,
                env=os.environ | self.store | {"PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def updates(self) -> list[int]:
        return [line["update"] for line in read_metrics(self.folder / METRICS_FILE)]

    def results(self) -> list[bytes]:
        """Weights of the last policy and of those after a third and two thirds, and the samples."""
        folders = [
            self.root / "policy",
            *(self.folder / "policies" / each for each in ("10", "20")),
        ]
        samples = [f"completions/step-0000{each}.jsonl" for each in ("00", "10", "20", "30")]
        return [
            *((folder / "model.safetensors").read_bytes() for folder in folders),
            *((self.folder / each).read_bytes() for each in samples),
        ]


@pytest.fixture(scope="module")
def whole(inputs, store, tmp_path_factory) -> Machine:
    """One machine that nothing happens to, and that copies nothing."""
    machine = Machine(tmp_path_factory.mktemp("whole"), inputs, store)
    assert machine.start(0, 1, 1, "").wait() == 0, machine.log.read_text()
    return machine


@pytest.mark.slow
def test_a_machine_that_is_lost_is_replaced(inputs, store, whole: Machine, tmp_path: Path):
    lost, new = (Machine(tmp_path / name, inputs, store) for name in ("lost", "new"))
    process = lost.start(0, 1, 1, "lost")
    wait_for_copies(store, "lost/ppo/machine-0", 10)
    lose(process, lost)
    assert new.start(0, 1, 2, "lost").wait() == 0, new.log.read_text()
    assert re.search(r"The training continues from checkpoint-\d", new.log.read_text())
    assert new.updates() == [*range(1, UPDATES + 1)]
    assert new.results() == whole.results()
    # The newest alone is kept.
    assert copied(store, "lost/ppo/machine-0") == {f"checkpoint-{UPDATES}"}


@pytest.mark.slow
def test_two_machines_with_a_folder_each(inputs, store, tmp_path: Path):
    """They train what two processes with one folder train, to the bit, also if one is lost."""
    shared = Machine(tmp_path / "shared", inputs, store)
    first = [shared.start(index, 2, 1, "") for index in range(2)]
    assert [process.wait() for process in first] == [0, 0], shared.log.read_text()

    machines = [Machine(tmp_path / f"machine-{index}", inputs, store) for index in range(2)]
    # The second machine comes first, with a lower process id: rank 0 is on the first one all the
    # same, which returns the metrics and the policy.
    running = [machines[index].start(index, 2, 1, "two") for index in (1, 0)][::-1]
    wait_for_copies(store, "two/ppo/machine-0", 10)
    wait_for_copies(store, "two/ppo/machine-1", 10)
    lose(running[1], machines[1])
    assert running[0].wait() != 0
    running = [machines[index].start(index, 2, 2, "two") for index in (1, 0)]
    logs = [one.log.read_text() for one in machines]
    assert [process.wait() for process in running] == [0, 0], "".join(logs)
    for machine in machines:
        assert "The training continues from checkpoint-" in machine.log.read_text()
    assert machines[0].updates() == shared.updates() == [*range(1, UPDATES + 1)]
    assert machines[0].results() == shared.results()


def finish_checkpoint(folder: Path, step: int) -> None:
    unfinished = folder / f".{step}"
    unfinished.mkdir(parents=True)
    (unfinished / f"weights-of-{folder.parent.name}").write_text(str(step))
    (unfinished / "manifest.json").write_text("{}")
    unfinished.rename(folder / f"checkpoint-{step}")


def finish_policy(folder: Path, update: int) -> None:
    policy = folder / "policies" / str(update)
    policy.mkdir(parents=True)
    (policy / "weights").write_text(str(update))


@pytest.mark.parametrize("count", [1, 2])
def test_a_new_machine_gets_the_policies_before_the_checkpoint(
    count: int, here_store, tmp_path: Path
):
    """A policy after the checkpoint may be half written, and is trained again."""
    prefix = f"policies-{count}"

    def machine(name: str, index: int) -> tuple[Workspace, Path, Machines]:
        root = tmp_path / name
        workspace = Workspace(str(root), f"s3://{BUCKET}/{prefix}")
        return workspace, root / "ppo", Machines(count=count, index=index)

    machines = [machine(f"machine-{index}", index) for index in range(count)]
    with ExitStack() as stack:
        for each in machines:
            stack.enter_context(mirrored(*each))
        for step in (5, 10):
            # The first machine alone has the main process, which saves the policies.
            finish_policy(machines[0][1], step)
            for index, (_, folder, _) in enumerate(machines):
                finish_checkpoint(folder, step)
                wait_for_copies(here_store, f"{prefix}/ppo/machine-{index}", step)
        finish_policy(machines[0][1], 12)
    again = machine("new", 0)
    with mirrored(*again):
        assert {*again[1].glob("policies/*/*")} == {
            again[1] / "policies" / str(step) / "weights" for step in (5, 10)
        }
        assert (again[1] / "checkpoint-10").is_dir()
        if count == 1:
            # A later checkpoint still has the policies of the first machine beside it.
            finish_policy(again[1], 15)
            finish_checkpoint(again[1], 15)
    last = machine("last", 0)
    with mirrored(*last):
        found = sorted(path.name for path in (last[1] / "policies").iterdir())
    assert found == (["10", "15", "5"] if count == 1 else ["10", "5"])


def test_a_checkpoint_that_an_attempt_left_uncopied_is_copied_by_the_next(
    here_store, tmp_path: Path
):
    workspace, folder = Workspace(str(tmp_path), f"s3://{BUCKET}/uncopied"), tmp_path / "ppo"
    with mirrored(workspace, folder):
        finish_checkpoint(folder, 5)
    finish_checkpoint(folder, 10)
    with mirrored(workspace, folder):
        wait_for_copies(here_store, "uncopied/ppo/machine-0", 10)
    assert copied(here_store, "uncopied/ppo/machine-0") == {"checkpoint-10"}


def test_the_next_training_in_a_folder_does_not_continue_from_the_previous_one(
    here_store, tmp_path: Path
):
    """As with the reward models of `fresh_pairs.rounds`."""
    workspace, folder = Workspace(str(tmp_path), f"s3://{BUCKET}/rounds"), tmp_path / "model"
    for training, step in (("a", 10), ("b", 5)):
        with mirrored(workspace, folder, training=training):
            assert not any(folder.iterdir())
            finish_checkpoint(folder, step)
        shutil.rmtree(folder)
    with mirrored(workspace, folder, training="b"):
        assert (folder / "checkpoint-5").is_dir()


def test_a_training_that_returns_to_a_machine_continues_from_the_other_ones_checkpoint(
    here_store, tmp_path: Path, capsys
):
    """The checkpoint 15 of machine `a` was not copied, so machine `b` did not continue from it."""
    first, second = (Workspace(str(tmp_path / name), f"s3://{BUCKET}/returned") for name in "ab")
    with mirrored(first, first.root / "ppo"):
        finish_checkpoint(first.root / "ppo", 5)
    finish_checkpoint(first.root / "ppo", 15)
    with mirrored(second, second.root / "ppo"):
        finish_checkpoint(second.root / "ppo", 10)
    capsys.readouterr()
    with mirrored(first, first.root / "ppo"):
        assert "continues from checkpoint-10." in capsys.readouterr().out
    assert copied(here_store, "returned/ppo/machine-0") == {"checkpoint-10"}


def test_metrics_come_from_the_first_machine(here_store, tmp_path: Path):
    """The second machine copies the metrics that it fetched, which are older."""
    for attempt in (1, 2, 3):
        folders = [tmp_path / f"{attempt}-{index}" / "ppo" for index in range(2)]
        with ExitStack() as stack:
            for index, folder in enumerate(folders):
                workspace = Workspace(str(folder.parent), f"s3://{BUCKET}/metrics")
                here = Machines(count=2, index=index)
                stack.enter_context(mirrored(workspace, folder, here))
            metrics = folders[0] / METRICS_FILE
            found = metrics.read_text() if metrics.exists() else ""
            assert found == "".join(f"{number}\n" for number in range(1, attempt))
            folders[0].mkdir(exist_ok=True, parents=True)
            metrics.write_text(f"{found}{attempt}\n")
            for folder in folders:
                finish_checkpoint(folder, attempt)


def test_an_error_of_the_training_is_kept_if_the_last_copy_fails(
    here_store, tmp_path: Path, capsys
):
    """An error of S3 would else make Metaflow repeat a training that cannot succeed."""
    first, second = (Workspace(str(tmp_path / name), f"s3://{BUCKET}/both") for name in "ab")
    with (
        pytest.raises(ConfigError, match="wrong"),
        mirrored(first, first.root / "ppo"),
    ):
        with mirrored(second, second.root / "ppo"):
            finish_checkpoint(second.root / "ppo", 5)
        finish_checkpoint(first.root / "ppo", 5)
        raise ConfigError("wrong")
    assert "Warning: The last files were not copied to S3: " in capsys.readouterr().out


def test_a_slow_machine_copies_what_another_one_has(here_store, tmp_path: Path):
    """Else the machines would have no checkpoint in common, and start anew."""
    folders = [tmp_path / name / "ppo" for name in ("quick", "slow", "new")]
    workspaces = [Workspace(str(one.parent), f"s3://{BUCKET}/slow") for one in folders]
    here = [Machines(count=2, index=index) for index in range(2)]
    with (
        mirrored(workspaces[0], folders[0], here[0]),
        mirrored(workspaces[1], folders[1], here[1]),
    ):
        for step in (5, 10):
            finish_checkpoint(folders[0], step)
            wait_for_copies(here_store, "slow/ppo/machine-0", step)
        assert copied(here_store, "slow/ppo/machine-0") == {"checkpoint-5", "checkpoint-10"}
        # The slow machine has no longer the first.
        finish_checkpoint(folders[1], 15)
        finish_checkpoint(folders[1], 10)
        wait_for_copies(here_store, "slow/ppo/machine-1", 15)
        assert copied(here_store, "slow/ppo/machine-1") == {"checkpoint-10", "checkpoint-15"}
    with mirrored(workspaces[2], folders[2], here[0]):
        found = {path.name for path in (folders[2] / "checkpoint-10").iterdir()}
    assert found == {"manifest.json", "weights-of-quick", "weights-of-slow"}
