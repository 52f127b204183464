"""Alarms reach a queue behind the topic, only when a person has to act, and without secrets."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from metaflow import current

from flow_parts import RunStoppedError
from pipeline.inputs.flow_run import FlowRun
from pipeline.registry import change_champion
from pipeline.registry.sync_aliases import sync_aliases
from pipeline.results.step_records import ValidatedReward
from pipeline.settings.make_settings import make_settings
from pipeline.settings.overrides import merge_tables
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import has_folder
from pipeline.storage.workspace import Workspace
from pipeline.tracking.mlflow_client import connect
from ppo_core.errors import ConfigError
from retraining import alarms
from step_wrapper import RECORDS, phase, with_next_move
from tests.helpers.runs.candidates import FIT
from tests.helpers.runs.deployments import example

RUN = "RLHF/7"

Read = Callable[[], list[dict[str, str]]]


@pytest.fixture(scope="module")
def settings() -> Settings:
    return make_settings({"task": "tldr", "registered_model": "policy"}, {}, ())


@pytest.fixture
def topic(store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Read]]:
    """A topic, and a function that reads the subject and text of each message behind it."""
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    for service in ("SNS", "SQS"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", store["AWS_ENDPOINT_URL_S3"])
    sns, sqs = boto3.client("sns"), boto3.client("sqs")
    arn = sns.create_topic(Name="alarms")["TopicArn"]
    queue = sqs.create_queue(QueueName="alarms")["QueueUrl"]
    where = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])
    sns.subscribe(TopicArn=arn, Protocol="sqs", Endpoint=where["Attributes"]["QueueArn"])

    def read() -> list[dict[str, str]]:
        found = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10)
        return [json.loads(one["Body"]) for one in found.get("Messages", [])]

    yield arn, read
    sqs.delete_queue(QueueUrl=queue)
    sns.delete_topic(TopicArn=arn)


def refused(*reasons: str) -> ValidatedReward:
    return replace(FIT, fit=False, reasons=list(reasons))


def test_a_refused_reward_model_is_told_with_its_reasons(
    topic: tuple[str, Read], settings: Settings
):
    arn, read = topic
    alarms.alarm_refused_reward_model(
        arn, settings, RUN, refused("It likes length.", "It guesses.")
    )
    (message,) = read()
    assert message["Subject"] == "policy: the reward model was refused"
    assert message["Message"].splitlines()[1:] == [
        "Run RLHF/7 ended before PPO.",
        "It likes length.",
        "It guesses.",
    ]


@pytest.mark.parametrize(
    ("promoted", "is_told"),
    [
        pytest.param([True], False, marks=pytest.mark.slow),
        pytest.param([False], False, marks=pytest.mark.slow),
        ([True, False], False),
        pytest.param([False, True], False, marks=pytest.mark.slow),
        ([True, False, False], True),
        pytest.param([False, False, False], True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("mlflow_client")
def test_only_the_second_refused_policy_in_a_row_is_told(
    topic: tuple[str, Read], settings: Settings, promoted: list[bool], is_told: bool
):
    arn, read = topic
    client = connect()
    client.create_registered_model("policy")
    for number, promote in enumerate(promoted, start=1):
        client.create_model_version("policy", "s3://bucket/policy")
        change_champion.challenge("policy", number)
        change_champion.record_decision(
            "policy",
            version=number,
            promote=promote,
            reasons=[f"Reason {number}."],
            by=f"run RLHF/{number}",
            key=f"RLHF/{number}",
            after=sync_aliases("policy"),
        )
    alarms.alarm_refused_policies(arn, settings, RUN)
    messages = read()
    assert len(messages) == is_told
    if is_told:
        last = len(promoted)
        assert messages[0]["Subject"] == "policy: 2 policies in a row were refused"
        for number in (last - 1, last):
            assert (
                f"Version {number}, run RLHF/{number}: Reason {number}." in messages[0]["Message"]
            )


@pytest.mark.parametrize(
    ("hours", "budget", "told"), [(2.0, 0.0, 0), (2.0, 2.0, 0), (2.04, 2.0, 1), (0.0, 2.0, 0)]
)
def test_only_a_run_above_its_budget_is_told(
    topic: tuple[str, Read],
    settings: Settings,
    tmp_path: Path,
    hours: float,
    budget: float,
    told: int,
):
    arn, read = topic
    alarms.alarm_budget(arn, budget, settings, used(tmp_path, hours))
    assert [one["Subject"] for one in read()] == ["policy: 2.0 GPU hours, budget 2"][:told]


def used(folder: Path, hours: float) -> FlowRun:
    """A run with one attempt of PPO on two GPUs."""
    run = FlowRun(id=RUN, workspace=Workspace(str(folder)), tracking={}, origin={}, data=[])
    usage = run.folder / "usage"
    usage.mkdir(parents=True)
    attempt = {"step": "train_policy", "started": 0.0, "seconds": hours * 1800, "gpus": 2}
    (usage / "train_policy-0.000.json").write_text(json.dumps(attempt))
    return run


@pytest.mark.parametrize(
    ("error", "is_remote", "attempt", "machine", "told"),
    [
        (ZeroDivisionError("bug"), False, 1, 0, 1),
        (ZeroDivisionError("bug"), False, 0, 0, 0),  # is retried
        (ConfigError("wrong"), False, 0, 0, 1),  # would fail again, so it is not retried here
        (ConfigError("wrong"), True, 0, 0, 0),  # a scheduler retries it all the same
        (ConfigError("wrong"), True, 1, 0, 1),
        (ConfigError("wrong"), True, 1, 1, 0),  # the first machine tells it
    ],
)
def test_a_run_above_its_budget_is_told_once_whatever_ends_it(
    topic: tuple[str, Read],
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    is_remote: bool,
    attempt: int,
    machine: int,
    told: int,
):
    arn, read = topic
    monkeypatch.setattr(current, "_retry_count", attempt)
    monkeypatch.setattr(
        type(current), "parallel", SimpleNamespace(node_index=machine), raising=False
    )
    if is_remote:
        monkeypatch.setenv("METAFLOW_RUNTIME_ENVIRONMENT", "kubernetes")
    retries = SimpleNamespace(name="retry", attributes={"times": 1})
    flow = SimpleNamespace(
        records=RECORDS,
        settings=settings,
        tracked=used(tmp_path, 3.0),
        lease="",
        file_deployment=merge_tables(example("argo"), {"alarms": {"topic": arn, "gpu_hours": 2.0}}),
        train_policy=SimpleNamespace(decorators=[retries]),
    )
    wrapper = phase()
    wrapper.pre_step("train_policy", flow, None)
    with suppress(SystemExit):
        wrapper.post_step("train_policy", flow, error)
    assert [one["Subject"] for one in read()] == ["policy: 3.0 GPU hours, budget 2"][:told]


def test_a_run_without_its_folder_ends_before_the_step(tmp_path: Path):
    workspace = Workspace(str(tmp_path))
    run = FlowRun(id=RUN, workspace=workspace, tracking={}, origin={}, data=[])
    flow = SimpleNamespace(
        records=RECORDS, settings=None, tracked=run, lease="", train_policy=SimpleNamespace()
    )
    with pytest.raises(RunStoppedError, match=f"has no folder '{run.folder}'.* Start `resume` in"):
        phase().pre_step("train_policy", flow, None)
    # With a store, each step fetches what it needs.
    flow.tracked = replace(run, workspace=replace(workspace, store="s3://bucket/rlhf"))
    assert has_folder(flow.tracked)


def test_a_subject_is_one_short_line_of_ascii_and_secrets_are_masked(
    topic: tuple[str, Read], monkeypatch: pytest.MonkeyPatch
):
    arn, read = topic
    monkeypatch.setenv("JUDGE_API_KEY", "canary-of-the-judge")
    alarms.send_alarm(arn, "Gefahr für\n" + "x" * 200, ["It answered canary-of-the-judge."])
    (message,) = read()
    assert message["Subject"].startswith("Gefahr f?r?xxx") and len(message["Subject"]) == 99
    assert "canary" not in message["Message"]


def test_a_topic_that_does_not_answer_does_not_fail_the_run(
    topic: tuple[str, Read], settings: Settings, capsys
):
    gone = topic[0] + "-gone"
    alarms.alarm_refused_reward_model(gone, settings, RUN, refused("It guesses."))
    said = capsys.readouterr().err
    assert "The alarm was not sent" in said and "Run RLHF/7 ended before PPO.\nIt guesses." in said


def test_an_mlflow_that_does_not_answer_does_not_fail_the_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    alarms.alarm_refused_policies("arn:aws:sns:us-east-1:123456789012:any", settings, RUN)
    assert "Could not check whether an alarm is due" in capsys.readouterr().err


def test_without_a_topic_nothing_is_sent_and_nothing_is_asked(settings: Settings, tmp_path: Path):
    """MLflow is not asked either: it has no such model here."""
    alarms.alarm_refused_policies("", settings, RUN)
    alarms.alarm_refused_reward_model("", settings, RUN, refused("It guesses."))
    alarms.alarm_budget("", 2.0, settings, used(tmp_path, 3.0))


@pytest.mark.parametrize(
    ("says", "of_retrain", "move"),
    [
        ("The disk is full.", False, "continue with `python flows/rlhf.py resume`"),
        ("MLflow is away. Then `python flows/rlhf.py resume`.", False, "rlhf.py resume`."),
        # The lease is of one run, and a resumed run has another id.
        ("MLflow is away. Then `python flows/rlhf.py resume`.", True, "flows/retrain.py` again."),
    ],
)
def test_an_error_ends_with_what_continues_the_run(says: str, of_retrain: bool, move: str):
    assert move in with_next_move(ConfigError(says), of_retrain=of_retrain)
