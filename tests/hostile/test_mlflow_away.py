"""MLflow that is away, slow or something else; and the MLflow runs of runs that do not end well."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import tomli_w
from mlflow import MlflowClient

import registry
from pipeline.launch.process_tree import ProcessIdentity, take_over
from pipeline.settings.settings import Settings
from pipeline.stages.start import prepare_inputs
from pipeline.tracking.decided_runs import find_decided_run, outcome_of, reason_of_outcome
from pipeline.tracking.killed_runs import end_killed_runs
from pipeline.tracking.mlflow_client import check_registry, explained
from pipeline.tracking.mlflow_facts import MAX_TAG_CHARACTERS
from pipeline.tracking.mlflow_runs import start_runs
from pipeline.tracking.run_list import list_runs
from pipeline.tracking.run_log import DESCRIPTION
from pipeline.tracking.run_record import ENDED_EARLY, PARENT, RECORD, RESUMED, was_killed
from pipeline.tracking.tracker import Tracker
from ppo_core.errors import ModelError
from serving.champion import champion_version, fetch_champion, load_champion
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.paths import ROOT
from tests.helpers.servers.full_disk import full_disk
from tests.helpers.servers.mlflow_store import tracking_to, write_database
from tests.helpers.servers.slow_servers import (
    drip,
    drip_the_head,
    list_then_drip,
    say_nothing,
    slow_server,
)

NAME = "cheerful"

# --- Addresses of databases that are none --------------------------------------


def other_program(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")


def cut(path: Path) -> None:
    write_database(path)
    path.write_bytes(path.read_bytes()[:5000])


def older(path: Path) -> None:
    write_database(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0123456789ab'")


UNUSABLE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no folder": (lambda path: None, "gone/mlflow.db", "there is no folder"),
    "a folder": (lambda path: path.mkdir(), "mlflow.db", "is a folder"),
    "a text": (
        lambda path: path.write_text("runs: []\n" * 9),
        "mlflow.db",
        "is not a sqlite database",
    ),
    "an image": (
        lambda path: path.write_bytes(b"\x89PNG\r\n" * 99),
        "mlflow.db",
        "is not a sqlite",
    ),
    "zeros": (lambda path: path.write_bytes(bytes(4096)), "mlflow.db", "is not a sqlite database"),
    "another program": (other_program, "mlflow.db", "of another program, with the table 'recipes'"),
    "cut": (cut, "mlflow.db", "cannot be read"),
    "another schema": (older, "mlflow.db", "schema"),
    "below a file": (lambda path: path.parent.write_text("x"), "file/mlflow.db", "no folder"),
}
"""By name: what makes the file, its path, and words of the message."""

COMMANDS: dict[str, Callable[[], object]] = {
    "the start of the flow": lambda: prepare_inputs(Settings(task="tldr", output_dir="outputs")),
    "check_registry": lambda: check_registry(NAME),
    "champion_version": lambda: champion_version(NAME),
    "load_champion": lambda: load_champion(NAME),
}


@pytest.fixture(params=UNUSABLE)
def unusable(request, tmp_path, monkeypatch) -> Iterator[tuple[str, str]]:
    """The address of something that is not a database, and words that describe it."""
    make, name, words = UNUSABLE[request.param]
    make(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with tracking_to(f"sqlite:///{tmp_path / name}"):
        yield f"sqlite:///{tmp_path / name}", words


@pytest.mark.parametrize("command", COMMANDS)
def test_an_address_that_is_no_database_is_one_message(command, unusable, tmp_path):
    if command == "the start of the flow" and unusable[1] == "schema":
        pytest.skip("the start checks the schema after its inputs, by check_registry")
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    address, words = unusable
    started = time.monotonic()
    with pytest.raises(ModelError) as refused:
        COMMANDS[command]()
    assert time.monotonic() - started < 10
    assert words in str(refused.value) and address in str(refused.value)
    assert "MLFLOW_TRACKING_URI" in str(refused.value)
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before


def test_the_registry_command_says_so_with_exit_code_1(unusable, capsys):
    assert registry.main(["show", NAME]) == 1
    said = capsys.readouterr().err
    assert unusable[1] in said and said.startswith("registry: ")


@pytest.mark.parametrize("command", ["champion_version", "load_champion"])
def test_a_folder_that_the_system_refuses_to_look_at_is_one_message(command, tmp_path):
    """A name that is too long is refused to root, too; a closed folder is not."""
    with (
        tracking_to(f"sqlite:///{tmp_path / ('long' * 99) / 'mlflow.db'}"),
        pytest.raises(ModelError, match=r"cannot be read: File name too long|there is no folder"),
    ):
        COMMANDS[command]()


@pytest.mark.parametrize("command", ["champion_version", "load_champion"])
def test_a_consumer_creates_no_database(command, tmp_path):
    with (
        tracking_to(f"sqlite:///{tmp_path / 'typo.db'}"),
        pytest.raises(ModelError, match=r"there is no database in .*typo\.db"),
    ):
        COMMANDS[command]()
    assert not list(tmp_path.iterdir())


def test_a_first_run_may_create_the_database(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tracking_to(write_database(tmp_path / "mlflow.db")):
        check_registry(NAME)


def test_a_database_without_room_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    uri = write_database(tmp_path / "mlflow.db")
    with (
        tracking_to(uri),
        full_disk(20_000),
        pytest.raises(ModelError, match=rf"(?s){uri} cannot start a run: .*Repair this server"),
    ):
        start_runs(NAME, "RLHF/1", {"seed": 1}, {}, STEPS)
    assert "Traceback" not in caplog.text


def test_a_full_disk_of_this_machine_is_not_an_error_of_mlflow(tmp_path):
    with full_disk(10), pytest.raises(OSError, match="File too large"), explained():
        (tmp_path / "large").write_bytes(bytes(20))


@pytest.mark.skipif(os.getuid() == 0, reason="everything is writable for root")
def test_a_database_that_is_not_writable_stops_the_start_of_the_flow(tmp_path):
    uri = write_database(tmp_path / "mlflow.db")
    (tmp_path / "mlflow.db").chmod(0o444)
    with tracking_to(uri), pytest.raises(ModelError, match="is not writable"):
        prepare_inputs(Settings(task="tldr", output_dir=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["gone/mlflow.db", "."])
def test_the_flow_itself_stops_soon(path, tmp_path):
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(tiny_table(tmp_path)))
    environment = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / path}",
        "PYTHONPATH": str(ROOT),
        "USERNAME": "rlhf",
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path),
    }
    started = time.monotonic()
    ran = subprocess.run(
        [sys.executable, ROOT / "flows/rlhf.py", "--config", "settings", "tiny.toml", "run"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    # The bound leaves room for a loaded machine, on which the start of Metaflow takes 20 s.
    assert time.monotonic() - started < 90
    said = ran.stdout + ran.stderr
    assert ran.returncode == 1 and "MLflow cannot use the database" in said
    assert "Traceback" not in said


# --- Servers that do not answer ------------------------------------------------

SLOW = {"says nothing": say_nothing, "drips": drip, "drips its head": drip_the_head}
QUESTIONS: dict[str, Callable[[Path], object]] = {
    "champion_version": lambda cache: champion_version(NAME, timeout=0.5),
    "fetch_champion": lambda cache: fetch_champion(NAME, cache=cache, timeout=0.5),
    "load_champion": lambda cache: load_champion(NAME, version=1, cache=cache, timeout=0.5),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("server", SLOW)
def test_a_registry_that_does_not_answer_is_given_up(server, question, tmp_path):
    started = time.monotonic()
    with (
        slow_server(SLOW[server]) as url,
        tracking_to(url, retries=7),
        pytest.raises(ModelError, match=r"gives no answer: .*within 0\.5 seconds"),
    ):
        QUESTIONS[question](tmp_path)
    assert time.monotonic() - started < 5
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("server", [*SLOW.values(), list_then_drip])
def test_a_store_that_does_not_answer_is_given_up(server, mlflow_client: MlflowClient, tmp_path):
    with slow_server(server) as url:
        location = f"{url}/api/2.0/mlflow-artifacts/artifacts"
        experiment = mlflow_client.create_experiment("away", artifact_location=location)
        model = mlflow_client.create_logged_model(experiment)
        mlflow_client.create_registered_model(NAME)
        version = mlflow_client.create_model_version(
            NAME,
            f"models:/{model.model_id}",
            tags={"manifest": "0" * 64},
            model_id=model.model_id,
        )
        started = time.monotonic()
        with pytest.raises(ModelError, match=r"cannot be read: no complete answer within"):
            fetch_champion(NAME, version=version.version, cache=tmp_path / "cache", timeout=2)
        assert time.monotonic() - started < 10
        assert not list((tmp_path / "cache").iterdir())


CONSUMER = """
import time
from flows.champion import champion_version
try:
    champion_version("cheerful", timeout=1)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_process_that_gave_up_can_end():
    with slow_server(drip) as url:
        ran = subprocess.run(
            [sys.executable, "-c", CONSUMER],
            env=os.environ | {"MLFLOW_TRACKING_URI": url},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert "no complete answer within 1 seconds" in ran.stdout


# --- The MLflow runs of runs that do not end well ------------------------------

STEPS = ["load_policy", "load_reward_model", "train_policy", "evaluate_win_rate", "register"]


class Runs:
    """The MLflow runs of a run of the flow in a folder of its own."""

    def __init__(self, client: MlflowClient, outputs: Path) -> None:
        self.client = client
        self.folder = outputs / "runs" / uuid4().hex[:8]
        self.folder.mkdir(parents=True)
        self.ids = start_runs(NAME, f"RLHF/{self.folder.name}", {}, {}, STEPS)

    def track(self, step: str) -> Tracker:
        return Tracker(self.folder, self.ids, step)

    def finish(self, *steps: str) -> None:
        for step in steps:
            with self.track(step):
                pass

    def kill_in(self, step: str) -> None:
        """Kill a step together with its scheduler, a shell."""
        self._end_in(
            step,
            "tracker.Tracker(Path(folder), runs, step, patience=99).__enter__()\n"
            f"os.kill(os.getpid(), {signal.SIGKILL})\n",
        )

    def end_without_mlflow(self, step: str, *, how: str = "pass") -> None:
        """Let a step end while MLflow is away; then its scheduler, a shell, ends."""
        self._end_in(
            step,
            "tracker.FAILED_SECONDS = tracker.FLUSH_SECONDS = 0.5\n"
            "with tracker.Tracker(Path(folder), runs, step):\n"
            f"    {how}\n",
            MLFLOW_TRACKING_URI="http://127.0.0.1:1",
            MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
        )

    def _end_in(self, step: str, code: str, **variables: str) -> None:
        imports = (
            "import json, os, sys\n"
            "from pathlib import Path\n"
            "from pipeline.tracking import tracker\n"
            "from ppo_core.errors import ModelError\n"
            "folder, runs, step = json.loads(sys.argv[1])\n"
        )
        words = json.dumps([str(self.folder), self.ids, step])
        subprocess.run(
            ["sh", "-c", '"$0" -c "$1" "$2"; true', sys.executable, imports + code, words],
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"} | variables,
            check=True,
        )

    @property
    def statuses(self) -> dict[str, str]:
        return {step: self.client.get_run(run).info.status for step, run in self.ids.items()}

    def why(self, step: str) -> str | None:
        return self.client.get_run(self.ids[step]).data.tags.get(ENDED_EARLY)

    def description(self) -> str:
        return self.client.get_run(self.ids[PARENT]).data.tags[DESCRIPTION]


@pytest.fixture
def runs(mlflow_client: MlflowClient, tmp_path: Path) -> Runs:
    return Runs(mlflow_client, tmp_path)


def test_a_failed_run_ends_all_its_runs_at_once(runs: Runs):
    runs.finish("load_policy", "load_reward_model")
    with pytest.raises(ModelError), runs.track("train_policy"):
        raise ModelError("It does not *fit*:\n- It repeats http://me:secret@host/x.")
    assert runs.statuses == {
        PARENT: "FAILED",
        "load_policy": "FINISHED",
        "load_reward_model": "FINISHED",
        "train_policy": "FAILED",
        "evaluate_win_rate": "KILLED",
        "register": "KILLED",
    }
    why = runs.why("train_policy")
    assert why.startswith("train_policy failed: It does not *fit*: - It repeats")
    assert runs.why("register") == f"not reached: {why}"
    assert runs.why("load_policy") is None
    assert runs.description().startswith(
        "**Failed**\n\n- train\\_policy failed: It does not \\*fit\\*: - It repeats"
    )
    assert "secret" not in why + runs.description()
    assert not (runs.folder / RECORD).exists()


def test_a_refusal_finishes_its_step_and_ends_the_others(runs: Runs):
    runs.finish("load_policy")
    with runs.track("load_reward_model") as tracker:
        tracker.refuse("It is not fit.", ["<b>It</b> repeats.", *(["It is long. " * 99] * 9)])
    assert runs.statuses == {
        PARENT: "FAILED",
        "load_policy": "FINISHED",
        "load_reward_model": "FINISHED",
        "train_policy": "KILLED",
        "evaluate_win_rate": "KILLED",
        "register": "KILLED",
    }
    assert runs.why(PARENT) == "It is not fit."
    assert runs.why("train_policy") == runs.why("register") == "not reached: It is not fit."
    start = "**Refused**\n\n- It is not fit.\n- &#60;b&#62;It&#60;/b&#62; repeats.\n- It is long."
    assert runs.description().startswith(start)
    assert len(runs.description()) <= MAX_TAG_CHARACTERS
    assert not (runs.folder / RECORD).exists()


def test_a_resumed_run_starts_its_runs_again(runs: Runs):
    runs.finish("load_policy", "load_reward_model")
    with pytest.raises(ModelError), runs.track("train_policy"):
        raise ModelError("no")
    runs.finish("train_policy")
    assert runs.description() == "**Running again, after an earlier attempt ended early**"
    runs.finish("evaluate_win_rate", "register", PARENT)
    assert set(runs.statuses.values()) == {"FINISHED"}
    assert runs.why("register") == runs.why(PARENT) == RESUMED
    assert not (runs.folder / RECORD).exists()


def test_a_refused_run_that_is_resumed_has_no_outcome_until_it_ends(runs: Runs):
    with runs.track("load_policy") as tracker:
        tracker.refuse("It is not fit.", [])
    assert "refused its reward model" in find_decided_run({})
    runs.finish("load_policy")
    assert find_decided_run({}) is None
    (listed,) = list_runs(runs.folder.parent)
    assert (listed.state, listed.verdict) == ("running", None)
    parent = runs.client.get_run(runs.ids[PARENT])
    assert (outcome_of(parent), reason_of_outcome(parent)) == ("has not ended", "")


def test_the_runs_of_a_killed_run_are_ended_by_the_next_run(runs: Runs, capsys):
    runs.finish("load_policy")
    runs.kill_in("load_reward_model")
    assert runs.statuses["train_policy"] == "SCHEDULED"
    assert was_killed(runs.folder)
    end_killed_runs(runs.folder.parent, "RLHF")
    assert runs.statuses.pop("load_policy") == "FINISHED"
    assert {status for step, status in runs.statuses.items() if step != "load_policy"} == {"KILLED"}
    assert runs.why("load_reward_model").startswith("The run of the flow was killed. The next run")
    assert runs.why("register").startswith("not reached: The run of the flow was killed. The next")
    assert runs.description().startswith("**Killed**\n\n- The run of the flow was killed. The next")
    number = runs.folder.name
    assert capsys.readouterr().out == (
        f"RLHF/{number} was killed. Its MLflow runs are ended. To continue it: "
        f"`python flows/rlhf.py resume --origin-run-id {number}`; if Retrain started it, "
        "start Retrain again.\n"
    )
    assert not (runs.folder / RECORD).exists()
    runs.finish(*STEPS[1:], PARENT)
    assert set(runs.statuses.values()) == {"FINISHED"}


def test_a_run_that_failed_while_mlflow_was_away_keeps_its_reason(runs: Runs, capsys):
    runs.finish("load_policy")
    runs.end_without_mlflow("train_policy", how="raise ModelError('no')")
    assert was_killed(runs.folder)
    assert runs.statuses[PARENT] == "RUNNING"
    end_killed_runs(runs.folder.parent, "RLHF")
    assert runs.statuses["train_policy"] == runs.statuses[PARENT] == "FAILED"
    assert runs.description().startswith("**Failed**\n\n- train\\_policy failed: no")
    assert "was killed" not in capsys.readouterr().out
    assert not (runs.folder / RECORD).exists()


def test_a_run_that_finished_while_mlflow_was_away_was_not_killed(runs: Runs, capsys):
    runs.finish(*STEPS)
    runs.end_without_mlflow(PARENT)
    assert was_killed(runs.folder)
    assert runs.statuses[PARENT] == "RUNNING"
    end_killed_runs(runs.folder.parent, "RLHF")
    assert set(runs.statuses.values()) == {"FINISHED"}
    assert runs.why(PARENT) is None
    assert capsys.readouterr().out == ""
    assert not (runs.folder / RECORD).exists()


def test_a_run_whose_scheduler_lives_is_not_ended(runs: Runs):
    runs.finish("load_policy")  # the record names this process
    end_killed_runs(runs.folder.parent, "RLHF")
    assert runs.statuses[PARENT] == "RUNNING"
    assert runs.statuses["register"] == "SCHEDULED"


def dead() -> dict[str, object]:
    """The identity of a process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    identity = asdict(ProcessIdentity.of(psutil.Process(process.pid)))
    process.kill()
    process.wait()
    return identity


def own() -> dict[str, object]:
    return asdict(ProcessIdentity.of(psutil.Process()))


RECORDS: dict[str, Callable[[], str]] = {
    "another machine": lambda: json.dumps([dead() | {"host": "elsewhere"}]),
    "half a record": lambda: json.dumps([dead()])[:-4],
    "an object": lambda: json.dumps(dead()),
    "texts": lambda: '["1", "2"]',
    "a pid as text": lambda: json.dumps([dead() | {"pid": "1"}]),
    "no UTF-8": lambda: "\udcff",
    "one lives": lambda: json.dumps([dead(), own()]),
}


@pytest.mark.parametrize("record", RECORDS)
def test_a_run_that_may_live_is_not_ended(record, tmp_path):
    content = RECORDS[record]()
    (tmp_path / RECORD).write_bytes(content.encode(errors="surrogateescape"))
    assert not was_killed(tmp_path)


def test_a_run_is_killed_when_all_its_processes_are_gone(tmp_path):
    (tmp_path / RECORD).write_text(json.dumps([dead(), dead()]))
    assert was_killed(tmp_path)


@pytest.mark.parametrize("record", ["", "[]", '{"host": 1}', "{"])
def test_a_damaged_record_of_the_launcher_is_said_and_replaced(record, tmp_path, capsys):
    path = tmp_path / "launcher-0.json"
    path.write_text(record)
    take_over(path)
    assert f"'{path}' is damaged" in capsys.readouterr().out
    assert json.loads(path.read_text()) == own()
