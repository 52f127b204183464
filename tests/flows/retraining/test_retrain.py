"""Retrain starts a training only for new inputs, and only with the lease."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from mlflow import MlflowClient

import retraining.retrain as retrain_module
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.storage.model_lease import Lease
from pipeline.tracking.decided_runs import outcome_of, runs_of_model
from ppo_core.errors import ConfigError, ModelError, ProcessError
from retraining.retrain import retrain
from retraining.retraining_trigger import NewInputs
from retraining.start_training import start_training, training_name
from tests.flows.retraining.test_retraining_trigger import decide

NAME = "rlhf-policy"

LINEAGE = {"data/preferences": "3fa9", "settings_digest": "77"}

pytestmark = pytest.mark.usefixtures("mlflow_client")


@pytest.fixture
def settings(table: dict[str, Any]) -> Settings:
    return make_settings(table, {}, ())


def found(settings: Settings, *, seen: str = "") -> NewInputs:
    new = [] if seen else ["data/preferences changed"]
    return NewInputs(settings=settings, lineage=LINEAGE, compared=LINEAGE, new=new, seen=seen)


def lease(settings: Settings, owner: str) -> Lease:
    return Lease(settings.store, NAME, owner)


def recorded() -> list[str]:
    return [outcome_of(run) for run in runs_of_model(NAME)]


def test_nothing_is_started_if_nothing_is_new(settings: Settings, capsys):
    outcome = retrain(found(settings, seen="RLHF/7 made it."), {}, "Retrain/1", take_over=False)
    assert outcome == "nothing new"
    assert "nothing new: RLHF/7 made it." in capsys.readouterr().out
    assert recorded() == ["nothing new"]
    assert lease(settings, "Retrain/2").take() is None


def test_a_second_run_ends_and_names_the_owner_of_the_lease(settings: Settings, capsys):
    first = lease(settings, "Retrain/1")
    first.take()
    first.renew("RLHF/7")
    assert retrain(found(settings), {}, "Retrain/2", take_over=False) == "busy"
    told = capsys.readouterr().out
    assert "busy: The lease belongs to Retrain/1 for RLHF/7, since" in told
    assert "If that run is dead, repeat with --take-over; in a deployment, this is" in told
    assert "`python flows/deploy.py DEPLOYMENT.toml --start --take-over`." in told
    assert recorded() == ["busy"]
    first.renew("RLHF/7")


def test_a_run_that_decided_meanwhile_is_seen(settings: Settings, mlflow_client: MlflowClient):
    """Another run may decide on equal inputs between the look and the lease."""
    decide(mlflow_client, found(settings), 7, promotion="promoted", version="1")
    assert retrain(found(settings), {}, "Retrain/2", take_over=False) == "nothing new"
    assert recorded() == ["promoted version 1", "nothing new"]
    assert lease(settings, "Retrain/3").take() is None


def test_a_training_that_cannot_be_started_releases_the_lease(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, store: dict[str, str]
):
    """Here the flow RLHF is not deployed beside the flow Retrain."""
    monkeypatch.setenv("SFN_STATE_MACHINE", "ours.prod.Retrain")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STEPFUNCTIONS", store["AWS_ENDPOINT_URL_S3"])
    monkeypatch.setenv("AWS_ENDPOINT_URL_SFN", store["AWS_ENDPOINT_URL_S3"])
    with pytest.raises(ProcessError, match=r"ours.prod.RLHF.*doesn't exist.*deploy it beside"):
        retrain(found(settings), {}, "Retrain/1", take_over=False)
    assert lease(settings, "Retrain/2").take() is None
    assert recorded() == ["failed"]


def test_an_interrupted_training_on_this_machine_releases_the_lease(
    settings: Settings, table: dict[str, Any]
):
    before = psutil.Process().children()

    def interrupt_after_the_start() -> None:
        while psutil.Process().children() == before:
            time.sleep(0.01)
        # Python may lose an interrupt while it starts the process.
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_after_the_start, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        retrain(found(settings), table, "Retrain/1", take_over=False)
    assert lease(settings, "Retrain/2").take() is None
    assert recorded() == ["failed"]


def test_an_mlflow_that_does_not_answer_releases_the_lease(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ModelError):
        retrain(found(settings), {}, "Retrain/1", take_over=False)
    assert lease(settings, "Retrain/2").take() is None


def test_an_mlflow_that_does_not_answer_after_the_start_is_a_warning(
    settings: Settings, store: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys
):
    """A retry of the step would start a second run with the lease of the first one."""
    monkeypatch.setenv("SFN_STATE_MACHINE", "ours.prod.Retrain")
    for service in ("SFN", "STEPFUNCTIONS"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", store["AWS_ENDPOINT_URL_S3"])
    nothing = json.dumps({"StartAt": "a", "States": {"a": {"Type": "Pass", "End": True}}})
    role = "arn:aws:iam::123456789012:role/role"
    boto3.client("stepfunctions").create_state_machine(
        name="ours.prod.RLHF", definition=nothing, roleArn=role
    )

    def start_and_lose_mlflow(*given: Any) -> str:
        started = start_training(*given)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        return started

    monkeypatch.setattr(retrain_module, "start_training", start_and_lose_mlflow)
    assert retrain(found(settings), {}, "Retrain/1", take_over=False) == "training"
    assert "Warning: The outcome is not in MLflow: " in capsys.readouterr().err
    assert "Retrain/1" in str(lease(settings, "Retrain/2").take())


@pytest.mark.slow
def test_a_training_that_fails_here_releases_the_lease(
    settings: Settings, table: dict[str, Any], capfd
):
    wrong = table | {"prompts": str(Path(settings.output_dir) / "nowhere.jsonl")}
    with pytest.raises(ProcessError, match="exit code 1; its messages are above"):
        retrain(found(settings), wrong, "Retrain/1", take_over=False)
    assert "nowhere.jsonl" in capfd.readouterr().out
    assert lease(settings, "Retrain/2").take() is None


def test_a_store_is_needed(settings: Settings, table: dict[str, Any]):
    there = make_settings({k: v for k, v in table.items() if k != "store"}, {}, ())
    with pytest.raises(ConfigError, match="needs a store"):
        retrain(found(there), {}, "Retrain/1", take_over=False)


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("Retrain", "RLHF"),
        ("ours.prod.team.Retrain", "ours.prod.team.RLHF"),
        ("retrain", "rlhf"),
        ("ours.prod.team.retrain", "ours.prod.team.rlhf"),
    ],
)
def test_the_training_flow_has_the_name_beside_that_of_retrain(own: str, name: str):
    assert training_name(own) == name


@pytest.mark.parametrize("own", ["machine-7", "ours.prod.a-name-of-more-than-45-chara.ret-k3x9a"])
def test_a_name_that_does_not_tell_that_of_the_training_flow_is_refused(own: str):
    with pytest.raises(ProcessError, match="Choose a shorter project or branch"):
        training_name(own)
