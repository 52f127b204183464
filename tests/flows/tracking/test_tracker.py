"""Tracking over real MLflow servers that are killed, hang, lose replies or never come back."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from transformers import TrainerCallback

from pipeline.tracking import mlflow_runs
from pipeline.tracking import tracker as tracker_module
from pipeline.tracking.mlflow_client import EXPERIMENT
from pipeline.tracking.mlflow_runs import start_runs
from pipeline.tracking.run_log import RunLog
from pipeline.tracking.run_record import ENDED_EARLY
from pipeline.tracking.tracker import Tracker
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ModelError
from ppo_core.models.reward_model import RewardModel
from ppo_core.trl.ppo_trainer import PPOTrainer
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.servers.fault_proxy import Fault, fault_proxy
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import MlflowServer, free_port, mlflow_server

CLOCKS = {"eps", "seconds"}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def client(server: MlflowServer) -> Iterator[MlflowClient]:
    """A client of the server, to which all tracking goes; a lost connection is tried again once."""
    if server.process is None:
        server.start()
    with tracking_to(server.url, retries=1):
        yield MlflowClient()


STEPS = ["load_policy", "load_reward_model", "train_policy", "evaluate_win_rate", "register"]


def make_runs(flow_run: str, **settings) -> dict[str, str]:
    return start_runs("cheerful", flow_run, settings, {}, STEPS)


def history(client: MlflowClient, run: str) -> dict[str, list[tuple[int, float]]]:
    """All stored points of a run but those of clocks and of the machine, by metric."""
    return {
        key: [(point.step, point.value) for point in client.get_metric_history(run, key)]
        for key in sorted(client.get_run(run).data.metrics)
        if key not in CLOCKS and not key.startswith(("time/", "system/"))
    }


def status(client: MlflowClient, run: str) -> str:
    return client.get_run(run).info.status


# --- What people look at -------------------------------------------------------------


def test_a_run_of_the_flow_is_a_parent_with_a_child_for_each_step(client, tmp_path):
    settings = {"seed": 1, "ppo": {"lr": 0.1}}
    runs = start_runs("cheerful", tmp_path.name, settings, {"commit": "abc"}, STEPS)
    assert list(runs) == ["parent", *STEPS]
    parent = client.get_run(runs["parent"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d cheerful", parent.info.run_name)
    assert parent.info.status == "RUNNING"
    assert parent.data.tags["flow_run"] == tmp_path.name
    assert parent.data.params == {"seed": "1", "ppo.lr": "0.1"}
    assert parent.data.tags["commit"] == "abc"
    for step in STEPS:
        child = client.get_run(runs[step])
        assert (child.info.run_name, child.info.status) == (step, "SCHEDULED")
        assert child.data.tags["mlflow.parentRunId"] == runs["parent"]
        assert child.data.tags["mlflow.user"] == parent.data.tags["mlflow.user"] != ""


def test_the_address_of_a_run_has_no_double_slash(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mlflow_runs, "_experiment_of_run", lambda run: "7")
    for server in ("http://host:5000", "http://host:5000/"):
        monkeypatch.setattr(mlflow_runs.mlflow, "get_tracking_uri", lambda server=server: server)
        assert mlflow_runs.address_of_run("r") == "http://host:5000/#/experiments/7/runs/r"


def test_a_start_that_is_tried_again_finds_its_runs(client, tmp_path):
    first = make_runs(tmp_path.name, seed=1)
    client.delete_run(first["register"])  # as if it had been killed before that one
    again = make_runs(tmp_path.name, seed=1)
    assert again["register"] != first["register"]
    assert {**again, "register": ""} == {**first, "register": ""}
    assert make_runs(tmp_path.name, seed=1) == again
    assert not set(make_runs(f"{tmp_path.name} next", seed=1).values()) & set(again.values())
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    ours = f"tags.flow_run LIKE '{tmp_path.name}%'"
    assert len(client.search_runs([experiment], ours)) == 2 * (len(STEPS) + 1)


def test_an_mlflow_that_is_away_starts_no_run(tmp_path):
    with (
        tracking_to(f"http://127.0.0.1:{free_port()}", retries=1),
        pytest.raises(ModelError, match=r"cannot start a run: .*run again"),
    ):
        make_runs(tmp_path.name)


def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(client, tmp_path):
    make_runs(tmp_path.name)
    number = client.get_experiment_by_name(EXPERIMENT).experiment_id
    client.delete_experiment(number)
    try:
        with pytest.raises(ModelError, match=rf"'{EXPERIMENT}'.* restore --experiment-id {number}"):
            make_runs(f"{tmp_path.name} next")
    finally:
        client.restore_experiment(number)


def test_the_state_of_a_step_is_that_of_its_run(client, tmp_path):
    runs = make_runs(tmp_path.name)
    with Tracker(tmp_path, runs, "load_policy") as tracker:
        tracker.require_all_sent()
        assert status(client, runs["load_policy"]) == "RUNNING"
    assert status(client, runs["load_policy"]) == "FINISHED"
    assert status(client, runs["parent"]) == "RUNNING"
    assert status(client, runs["register"]) == "SCHEDULED"

    with pytest.raises(ValueError, match="no"), Tracker(tmp_path, runs, "train_policy"):
        raise ValueError("no")
    assert status(client, runs["train_policy"]) == "FAILED"
    assert status(client, runs["parent"]) == "FAILED"

    with pytest.raises(KeyboardInterrupt), Tracker(tmp_path, runs, "train_policy"):
        raise KeyboardInterrupt
    reason = client.get_run(runs["parent"]).data.tags[ENDED_EARLY]
    assert reason == "train_policy failed: KeyboardInterrupt()"

    with Tracker(tmp_path, runs, "train_policy") as tracker:
        tracker.parent.log_metrics({"win_rate": 0.6})
    ended = client.get_run(runs["train_policy"]).info
    assert ended.status == "FINISHED"
    assert abs(ended.end_time - time.time() * 1000) < 60_000
    assert status(client, runs["parent"]) == "RUNNING"

    with Tracker(tmp_path, runs, "parent"):
        pass
    assert status(client, runs["parent"]) == "FINISHED"
    metrics = client.get_run(runs["parent"]).data.metrics
    assert metrics["win_rate"] == 0.6
    # The last step is tracked by the parent, and is not the whole run.
    assert "seconds" not in metrics


def test_a_short_step_leaves_all_to_the_next_one_and_a_failing_one_sends_it(client, tmp_path):
    runs = make_runs(tmp_path.name)
    with Tracker(tmp_path, runs, "load_policy", patience=600) as tracker:
        tracker.step.log_metrics({"loss": 1.0})
    assert status(client, runs["load_policy"]) == "SCHEDULED"
    with (
        pytest.raises(ValueError, match="no"),
        Tracker(tmp_path, runs, "load_reward_model", patience=600),
    ):
        raise ValueError("no")
    ended = client.get_run(runs["load_policy"])
    assert (ended.info.status, ended.data.metrics["loss"]) == ("FINISHED", 1.0)
    assert not [name for name in ended.data.metrics if name.startswith("system/")]
    assert status(client, runs["load_reward_model"]) == "FAILED"
    assert status(client, runs["parent"]) == "FAILED"


def test_a_patient_step_that_takes_longer_is_seen_while_it_works(client, tmp_path):
    runs = make_runs(tmp_path.name)
    run = runs["load_policy"]
    with Tracker(tmp_path, runs, "load_policy", patience=0.3):
        deadline = time.monotonic() + 60
        while status(client, run) != "RUNNING":
            assert time.monotonic() < deadline
            time.sleep(0.05)
    ended = client.get_run(run)
    assert ended.info.status == "FINISHED"
    assert "system/cpu_utilization_percentage" in ended.data.metrics


def test_tables_and_pages_are_stored_and_a_step_tried_again_doubles_none(client, tmp_path):
    runs = make_runs(tmp_path.name)
    rows = [{"prompt": "p", "answer": "ä <b>", "score": math.nan}, {**_ROW, "extra": 1}]
    kept = tmp_path / "kept" / "judgements.jsonl"
    kept.parent.mkdir()
    kept.write_text("{}")
    for _ in range(2):
        with Tracker(tmp_path / "journal", runs, "evaluate_win_rate") as tracker:
            tracker.step.log_table(rows, "samples.json")
            tracker.step.log_table([], "tables/none.json")
            tracker.step.log_text("<h1>ä</h1>", "reward-model/report.html")
            tracker.step.log_json({"fit": True}, "reward-model/report.json")
            tracker.step.log_artifact(kept)
            tracker.step.log_artifact(kept.parent, "all")
    run = runs["evaluate_win_rate"]
    experiment = client.get_run(run).info.experiment_id
    table = client.load_table(experiment, "samples.json", run_ids=[run])
    assert list(table.columns) == ["prompt", "answer", "score"]
    assert table["answer"].tolist() == ["ä <b>", "b"]
    assert math.isnan(table["score"][0])
    tables = json.loads(client.get_run(run).data.tags["mlflow.loggedArtifacts"])
    assert tables == [
        {"path": "samples.json", "type": "table"},
        {"path": "tables/none.json", "type": "table"},
    ]
    folder = Path(client.download_artifacts(run, ""))
    assert (folder / "reward-model" / "report.html").read_text() == "<h1>ä</h1>"
    assert json.loads((folder / "reward-model" / "report.json").read_text()) == {"fit": True}
    assert (folder / "judgements.jsonl").read_text() == "{}"
    assert (folder / "all" / "judgements.jsonl").exists()


_ROW = {"prompt": "q", "answer": "b", "score": 1.0}


def test_the_machine_is_sampled_under_the_names_of_mlflow_and_counts_on(
    client, tmp_path, monkeypatch
):
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.3")
    runs = make_runs(tmp_path.name)
    run = runs["train_policy"]
    for samples in (1, 3):
        with Tracker(tmp_path, runs, "train_policy") as tracker:
            deadline = time.monotonic() + 60
            while tracker.journal.next_step(run, "system/") < samples:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    logged = client.get_run(run).data.metrics
    theirs = SystemMetricsMonitor(run)
    theirs.collect_metrics()
    names = {f"system/{name}" for name in theirs.aggregate_metrics()}
    assert {name for name in logged if name.startswith("system/")} == names
    points = client.get_metric_history(run, "system/cpu_utilization_percentage")
    steps = [point.step for point in points]
    assert steps == list(range(len(steps))) and len(steps) >= 3
    assert any(point.value > 0 for point in points)


# --- What MLflow will never take -----------------------------------------------------


def test_what_mlflow_refuses_is_set_aside_by_name_and_the_rest_goes_on(client, tmp_path, capsys):
    runs = make_runs(tmp_path.name)
    client.delete_run(runs["register"])
    with Tracker(tmp_path, runs, "train_policy") as tracker:
        for step in range(1, 4):
            values = {f"m{n}": float(n) for n in range(30)}
            tracker.step.log_metrics({**values, "reward@2": 1.0}, step=step)
        tracker.step.set_tags({"x" * 300: "v", "after": "yes"})
        tracker.step.log_artifact(tmp_path / "never-written.txt")
        with tracker.journal.path.open("ab") as file:
            file.write(b"\0\0\n")
        Tracker(tmp_path, runs, "register").step.log_metrics({"a": 1.0, "b": 2.0})
        tracker.step.log_metrics({"last": 1.0})
    stored = history(client, runs["train_policy"])
    assert stored == {
        **{f"m{n}": [(step, float(n)) for step in range(1, 4)] for n in range(30)},
        "last": [(0, 1.0)],
    }
    assert client.get_run(runs["train_policy"]).data.tags["after"] == "yes"
    refused = [json.loads(line) for line in tracker.journal.refused.read_text().splitlines()]
    assert [set(line.get("values", ())) for line in refused] == [
        *([{"reward@2"}] * 3),
        *([set()] * 3),
        *([{"a"}, {"b"}]),
    ]
    assert "never-written.txt is gone" in refused[4]["refused"]
    printed = capsys.readouterr().out
    assert printed.count("metrics reward@2 of run") == 1
    assert f"that cannot be sent, are stored in {tracker.journal.refused}." in printed
    assert "A damaged line of the journal cannot be sent to MLflow" in printed
    assert "\\x00" not in printed


def test_a_lock_that_cannot_be_written_ends_the_sending_with_a_warning(tmp_path, capsys):
    (tmp_path / "journal.sending").mkdir()
    runs = make_runs(tmp_path.name)
    with Tracker(tmp_path, runs, "train_policy") as tracker:
        tracker.step.log_metrics({"loss": 1.0})
    assert "Nothing more is sent to MLflow. " in (printed := capsys.readouterr().out)
    assert f"'{tmp_path / 'journal.sending'}' cannot be written" in printed


# --- MLflow is away ------------------------------------------------------------------

CONFIG = PPOConfig(
    total_episodes=64,
    batch_size=8,
    num_ppo_epochs=1,
    num_mini_batches=1,
    per_device_train_batch_size=8,
    local_rollout_forward_batch_size=8,
    response_length=8,
    learning_rate=1e-3,
    missing_eos_penalty=1.0,
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
)
UPDATES = 8


class Tracking(TrainerCallback):
    """Logs what a trainer logs."""

    def __init__(self, log: RunLog) -> None:
        self.log = log

    def on_log(self, args, state, control, *, logs, **kwargs):
        numbers = {name: value for name, value in logs.items() if value is not None}
        self.log.log_metrics(numbers, step=state.global_step)


class AtUpdate(TrainerCallback):
    """Does something after some of the updates."""

    def __init__(self, do: dict) -> None:
        self.do = do

    def on_step_end(self, args, state, control, **kwargs):
        self.do.get(state.global_step, lambda: None)()


def train(tracker: Tracker, at: dict) -> list[dict[str, float]]:
    """A small training of a real policy."""
    trainer = PPOTrainer(
        replace(CONFIG),
        processing_class=make_tokenizer(),
        model=make_policy(),
        ref_model=make_policy(),
        reward_model=RewardModel(make_classifier(), make_tokenizer()),
        train_dataset=[f"w{i} w{(3 * i) % 50}" for i in range(40)],
        callbacks=[Tracking(tracker.step), AtUpdate(at)],
    )
    return trainer.train()


def undisturbed_and_disturbed(client, server, tmp_path, away: float) -> None:
    """Train twice; the second time the server is killed after update 3, for `away` seconds."""
    stored = {}
    for name in ("undisturbed", "disturbed"):
        runs = make_runs(f"{tmp_path.name} {name}")
        back = threading.Timer(away, server.start)

        def kill(timer=back):
            assert tracker.require_all_sent() is None
            server.kill()
            timer.start()

        with Tracker(tmp_path / name, runs, "train_policy") as tracker:
            updates = train(tracker, {3: kill} if name == "disturbed" else {})
            if name == "disturbed":
                before = tracker.journal.unsent()
                back.join()
        stored[name] = history(client, runs["train_policy"])
        assert status(client, runs["train_policy"]) == "FINISHED"
    assert sum(entry["kind"] == "metrics" for entry, _ in before) >= UPDATES - 3
    assert stored["disturbed"] == stored["undisturbed"]
    expected = {
        name: [(step, pytest.approx(update[name])) for step, update in enumerate(updates, start=1)]
        for name in updates[0]
        if name not in CLOCKS and not name.startswith("time/")
    }
    assert {name: stored["disturbed"][name] for name in expected} == expected


@pytest.mark.slow
def test_a_training_during_which_mlflow_is_killed_has_the_curves_of_an_undisturbed_one(
    client, server, tmp_path
):
    undisturbed_and_disturbed(client, server, tmp_path, away=3)


@pytest.mark.slow
def test_a_training_during_which_mlflow_is_away_for_a_minute_has_the_same_curves(
    client, server, tmp_path, monkeypatch
):
    # The retries that the flow sets: one try takes 14 seconds and more.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "2")
    undisturbed_and_disturbed(client, server, tmp_path, away=60)


def test_a_step_ends_while_mlflow_is_away_and_a_later_one_sends_all_in_order(
    client, server, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tracker_module, "FLUSH_SECONDS", 1.0)
    runs = make_runs(tmp_path.name)
    server.kill()
    with Tracker(tmp_path, runs, "train_policy") as tracker:
        for step in range(1, 2501):
            tracker.step.log_metrics({"loss": 1 / step}, step=step)
        for verdict in ("a", "b", "c"):
            tracker.step.set_tags({"verdict": verdict})
        message = r"has not accepted 250\d tracked entries .*rlhf.py resume"
        with pytest.raises(ModelError, match=message):
            tracker.require_all_sent(seconds=0.5)
    kept = len(tracker.journal.unsent())
    printed = capsys.readouterr().out
    assert printed.count("MLflow does not accept tracked entries (ConnectionRefusedError: ") == 1
    assert f"MLflow has not accepted {kept} tracked entries" in printed
    assert f"stored in {tmp_path}. The next step or the next run on this machine sends" in printed

    server.start()
    with Tracker(tmp_path, runs, "evaluate_win_rate") as tracker:
        tracker.require_all_sent()
    stored = history(client, runs["train_policy"])
    assert stored == {"loss": [(step, 1 / step) for step in range(1, 2501)]}
    assert client.get_run(runs["train_policy"]).data.tags["verdict"] == "c"
    assert status(client, runs["train_policy"]) == "FINISHED"


def test_a_server_that_hangs_holds_up_neither_a_step_nor_its_end(
    client, server, tmp_path, monkeypatch
):
    monkeypatch.setattr(tracker_module, "FLUSH_SECONDS", 2.0)
    runs = make_runs(tmp_path.name)
    hung = threading.Event()
    with Tracker(tmp_path, runs, "train_policy") as tracker:
        tracker.require_all_sent()
        os.killpg(server.process.pid, signal.SIGSTOP)
        woken = threading.Timer(60, lambda: (hung.set(), wake(server)))
        woken.start()
        for step in range(1, 21):
            tracker.step.log_metrics({"loss": 1 / step}, step=step)
    assert not hung.is_set()  # the step has ended while the server still hangs
    assert len(tracker.journal.unsent()) > 0
    woken.cancel()
    wake(server)
    with Tracker(tmp_path, runs, "evaluate_win_rate") as tracker:
        tracker.require_all_sent()
    assert history(client, runs["train_policy"]) == {
        "loss": [(step, 1 / step) for step in range(1, 21)]
    }


def wake(server: MlflowServer) -> None:
    os.killpg(server.process.pid, signal.SIGCONT)


@pytest.mark.slow
def test_what_a_killed_process_has_not_sent_is_sent_by_the_next_and_nothing_twice(
    client, server, tmp_path
):
    runs = make_runs(tmp_path.name)
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    code = (
        "import json, sys, time; from pathlib import Path\n"
        "from pipeline.tracking.tracker import Tracker\n"
        "folder = Path(sys.argv[1]); runs = json.loads((folder / 'runs.json').read_text())\n"
        "with Tracker(folder, runs, 'train_policy') as tracker:\n"
        "    for step in range(1, 100000):\n"
        "        tracker.step.log_metrics({'loss': 1 / step, 'nan': float('nan')}, step=step)\n"
        "        time.sleep(0.002)\n"
    )
    killed_with_some_left = 0
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"},
        )
        stored_before = len(history(client, runs["train_policy"]).get("loss", ()))
        deadline = time.monotonic() + 60
        while len(history(client, runs["train_policy"]).get("loss", ())) == stored_before:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
        killed_with_some_left += len(Tracker(tmp_path, runs, "parent").journal.unsent()) > 0
        assert status(client, runs["train_policy"]) == "RUNNING"
    with Tracker(tmp_path, runs, "train_policy") as tracker:
        last = tracker.journal.next_step(runs["train_policy"], "loss")
    stored = history(client, runs["train_policy"])
    assert killed_with_some_left > 0
    assert stored["loss"] == [(step, 1 / step) for step in range(1, last)]
    assert [step for step, value in stored["nan"] if math.isnan(value)] == list(range(1, last))
    assert status(client, runs["train_policy"]) == "FINISHED"


# --- Replies that are lost -----------------------------------------------------------


@pytest.mark.slow
def test_a_reply_that_is_lost_after_mlflow_has_stored_doubles_nothing(client, server, tmp_path):
    made = "experiments/create", "runs/create", "runs/update", "runs/set-tag"
    sent = "runs/log-batch", "runs/update", "runs/set-tag"
    values = {"a": 1 / 3, "nan": math.nan, "inf": math.inf}
    with fault_proxy(server.url) as proxy:
        proxy.faults = [Fault(path, drop=True, times=2) for path in made]
        with tracking_to(proxy.url, retries=2):
            runs = make_runs(tmp_path.name, seed=1)
        proxy.faults = [Fault(path, drop=True, times=2) for path in sent]
        # MLflow itself tries once, so that our tries are put to the test as well.
        with (
            tracking_to(proxy.url, retries=0),
            Tracker(tmp_path, runs, "train_policy") as tracker,
        ):
            for step in range(1, 4):
                tracker.step.log_metrics(values, step=step)
                tracker.require_all_sent()
            tracker.step.set_tags({"verdict": "fit"})
    assert [len(fault.hits) for fault in proxy.faults] == [2, 2, 2]
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    found = client.search_runs([experiment], f"tags.flow_run = '{tmp_path.name}'")
    assert {run.info.run_id for run in found} == set(runs.values())
    run = client.get_run(runs["train_policy"])
    assert run.data.tags["verdict"] == "fit"
    assert run.info.status == "FINISHED"
    biggest = sys.float_info.max  # as MLflow stores the infinite
    stored = history(client, runs["train_policy"])
    assert stored["a"] == [(step, 1 / 3) for step in range(1, 4)]
    assert stored["inf"] == [(step, biggest) for step in range(1, 4)]
    assert [math.isnan(value) for _, value in stored["nan"]] == [True] * 3
    latest = run.data.metrics
    assert (latest["a"], latest["inf"], math.isnan(latest["nan"])) == (1 / 3, biggest, True)
