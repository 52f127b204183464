"""Deployed once, left alone: weeks of a deployment on Step Functions, executed by moto.

Every week the schedule starts the flow Retrain, which starts a training only if something is new.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tomli_w
from mlflow.entities.model_registry import ModelVersion

from tests.helpers.aws.batch_jobs import QUEUE
from tests.helpers.aws.cloud import Cloud, cloud_of
from tests.helpers.aws.state_machine import ROLES, Execution
from tests.helpers.inputs.changing_preferences import (
    JUDGE,
    Rows,
    reversed_value,
    roughly,
    rows_of_pairs,
    rows_of_texts,
    value,
)
from tests.helpers.inputs.pipeline_inputs import write_model, write_rows
from tests.helpers.paths import ROOT
from tests.helpers.runs.champion_follower import champion_follower
from tests.helpers.servers.servers import BUCKET

NAME = "weekly"

PREFERENCES = "data/pairs"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@dataclass
class Life:
    """The deployment, and what its weeks left behind."""

    cloud: Cloud
    folder: Path
    queue: str
    weeks: dict[str, Execution] = field(default_factory=dict)
    trainings: dict[str, Execution] = field(default_factory=dict)
    """The executions of Retrain and of RLHF, by the name of the week."""

    alarms: dict[str, list[str]] = field(default_factory=dict)
    """Subjects of the messages in the queue after a week."""

    champions: dict[str, int] = field(default_factory=dict)
    """Champion after each week."""

    seen: list[dict[str, str]] = field(default_factory=list)
    audit: str = ""

    def machine(self, flow: str) -> str:
        return self.cloud.machines.machine(f"weekly.prod.{flow}")

    def add(self, name: str, rows: Rows) -> None:
        """Store a file of preferences below the prefix."""
        self.cloud.upload(Path(write_rows(self.folder / name, rows)), f"pairs/{name}")

    def remove(self, name: str) -> None:
        self.cloud.machines.client("s3").delete_object(Bucket=BUCKET, Key=f"{PREFERENCES}/{name}")

    def run(self, week: str) -> None:
        """Start Retrain as the schedule does, and wait for what it starts."""
        machines, before = self.cloud.machines, self.executions()
        self.weeks[week] = machines.start(self.machine("Retrain"))
        self.end(week, before)

    def end(self, week: str, before: list[str]) -> None:
        """Wait for the trainings that a week started, and take down what they changed."""
        started = [arn for arn in self.executions() if arn not in before]
        assert len(started) <= 1
        if started:
            self.trainings[week] = self.cloud.machines.wait(started[0])
        self.alarms[week] = self._messages()
        self.champions[week] = self.champion()

    def executions(self) -> list[str]:
        return self.cloud.machines.executions(self.machine("RLHF"))

    def champion(self) -> int:
        return int(self.cloud.mlflow.get_model_version_by_alias(NAME, "champion").version)

    def versions(self) -> list[ModelVersion]:
        found = self.cloud.mlflow.search_model_versions(f"name = '{NAME}'")
        return sorted(found, key=lambda one: int(one.version))

    def command(self, *words: str) -> str:
        ran = subprocess.run(
            [sys.executable, ROOT / "flows" / "registry.py", *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "MLFLOW_TRACKING_URI": self.cloud.server.url, "PYTHONPATH": str(ROOT)}

    def _messages(self) -> list[str]:
        sqs = self.cloud.machines.client("sqs")
        found = sqs.receive_message(QueueUrl=self.queue, MaxNumberOfMessages=10)
        for one in found.get("Messages", []):
            sqs.delete_message(QueueUrl=self.queue, ReceiptHandle=one["ReceiptHandle"])
        return [json.loads(one["Body"])["Subject"] for one in found.get("Messages", [])]


def deploy(life: Life, topic: str) -> None:
    """Write inputs, settings and the deployment file, and deploy them."""
    folder, upload = life.folder, life.cloud.upload
    (folder / "judge.py").write_text(JUDGE)
    texts = {
        "sft_data": ("sft.jsonl", rows_of_texts(1, 256, "completion")),
        "preferences_test": ("test.jsonl", rows_of_pairs(2, 300, value)),
        "prompts": ("prompts.jsonl", rows_of_texts(3, 256)),
        "eval_prompts": ("eval.jsonl", rows_of_texts(4, 200, "reference")),
    }
    training = {"batch_size": 32, "max_length": 32, "learning_rate": 2e-3}
    ppo = {"total_episodes": 2048, "batch_size": 64, "response_length": 6, "save_steps": 4}
    settings = {
        "policy": upload(Path(write_model(folder / "policy"))),
        **{
            key: upload(Path(write_rows(folder / file, rows)))
            for key, (file, rows) in texts.items()
        },
        "preferences": f"s3://{BUCKET}/{PREFERENCES}",
        "judge": f"python:{upload(folder / 'judge.py')}:judge",
        "registered_model": NAME,
        "sft": training,
        "reward_model_training": training,
        "ppo": ppo | {"kl_coef": 0.05},
        # The raters count good words, so the best answers are as long as they may be.
        "promotion": {"guards": {"off": ["stops"]}},
    }
    (folder / "settings.toml").write_text(tomli_w.dumps(settings))
    deployment = {
        "scheduler": "step-functions",
        "settings": "settings.toml",
        "project": "weekly",
        "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/rlhf:1",
        "schedule": {"cron": "0 2 ? * MON *"},
        "alarms": {"topic": topic},
        "defaults": {"queue": QUEUE, "role": f"{ROLES}/train"},
        "retrain": {"role": f"{ROLES}/retrain"},
    }
    (folder / "deployment.toml").write_text(tomli_w.dumps(deployment))
    life.cloud.machines.deploy(folder / "deployment.toml")


def alarm_topic(cloud: Cloud) -> tuple[str, str]:
    """Return the ARN of a topic, and the address of the queue behind it."""
    sns, sqs = cloud.machines.client("sns"), cloud.machines.client("sqs")
    topic = sns.create_topic(Name="alarms")["TopicArn"]
    queue = sqs.create_queue(QueueName="alarms")["QueueUrl"]
    found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=found["Attributes"]["QueueArn"])
    return topic, queue


def kill_twice_after_copies(life: Life) -> threading.Thread:
    """Kill the process of PPO after it has copied a checkpoint, and its second attempt, too."""
    before = set(life.cloud.objects("metaflow/rlhf/runs/"))
    s3 = life.cloud.machines.client("s3")

    def copy() -> str | None:
        """The last copy: the manifest is written after all its files."""
        for key in life.cloud.objects("metaflow/rlhf/runs/"):
            if key.endswith("/ppo/machine-0/manifest.json") and key not in before:
                return str(s3.head_object(Bucket=BUCKET, Key=key)["ETag"])
        return None

    def watch() -> None:
        last = None
        for _ in range(2):
            while (now := copy()) == last:
                time.sleep(0.05)
            last = now
            os.killpg(life.cloud.machines.jobs.running[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def two_triggers(life: Life) -> None:
    """Start Retrain twice at once; one of both is taken as the first week's."""
    machines, before = life.cloud.machines, life.executions()
    started = [machines.trigger(life.machine("Retrain")) for _ in range(2)]
    ended = sorted((machines.wait(arn) for arn in started), key=lambda one: "busy:" in log_of(one))
    life.weeks["first"], life.weeks["second trigger"] = ended
    life.end("first", before)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    folder = tmp_path_factory.mktemp("life")
    with cloud_of(folder) as cloud:
        topic, queue = alarm_topic(cloud)
        life = Life(cloud, folder, queue)
        life.add("first.jsonl", rows_of_pairs(11, 1200, roughly))
        deploy(life, topic)
        two_triggers(life)
        with champion_follower(NAME, "w30 w31 w32 w33", folder, life.environment) as follower:
            follower.wait_for("1")
            life.run("nothing new")
            life.add("better.jsonl", rows_of_pairs(12, 2400, value))
            life.run("better")
            follower.wait_for("2")
            life.add("poisoned.jsonl", rows_of_pairs(13, 9000, reversed_value))
            life.run("poisoned")
            life.remove("poisoned.jsonl")
            life.add("more.jsonl", rows_of_pairs(14, 600, value))
            killer = kill_twice_after_copies(life)
            life.run("killed")
            killer.join(timeout=1)
            assert not killer.is_alive(), "PPO ended before it was killed twice"
            life.command("rollback", NAME, "--reason", "a test")
            follower.wait_for(str(life.champion()))
            life.run("after the rollback")
        life.seen = follower.seen
        life.audit = life.command("audit", NAME)
        print(life.audit)
        yield life


def log_of(execution: Execution) -> str:
    return "".join(job.log for job in execution.jobs)


def steps(execution: Execution) -> list[str]:
    return [job.step for job in execution.jobs]


def test_the_first_run_makes_the_first_champion(life: Life):
    assert life.trainings["first"].status == "SUCCEEDED", log_of(life.trainings["first"])[-4000:]
    assert "training: New: no champion." in log_of(life.weeks["first"])
    assert (life.champions["first"], life.alarms["first"]) == (1, [])


def test_of_two_triggers_one_trains_and_the_other_names_the_owner(life: Life):
    owner = f"Retrain/sfn-{life.weeks['first'].name}"
    second = life.weeks["second trigger"]
    assert second.status == "SUCCEEDED"
    assert f"busy: The lease belongs to {owner}" in log_of(second)


def test_without_news_no_training_is_submitted(life: Life):
    for week in ("nothing new", "after the rollback"):
        assert week not in life.trainings
        assert life.weeks[week].status == "SUCCEEDED"
        assert steps(life.weeks[week]) == ["start", "end"]
        assert "nothing new: " in log_of(life.weeks[week])
    assert life.champions["nothing new"] == 1


def test_better_preferences_make_a_better_champion(life: Life):
    assert "New: data/preferences changed." in log_of(life.weeks["better"])
    assert life.trainings["better"].status == "SUCCEEDED", log_of(life.trainings["better"])[-4000:]
    assert (life.champions["better"], life.alarms["better"]) == (2, [])
    won = life.cloud.mlflow.get_run(life.versions()[1].run_id).data.metrics
    assert won["win_rate/ppo_vs_champion/low"] > 0.5


def test_poisoned_preferences_are_refused_and_told(life: Life):
    ended = life.trainings["poisoned"]
    assert ended.status == "FAILED"
    assert steps(ended)[-1] == "validate_reward_model"
    assert life.champions["poisoned"] == 2
    assert life.alarms["poisoned"] == [f"{NAME}: the reward model was refused"]


def test_a_training_that_is_killed_twice_makes_one_version(life: Life):
    ended = life.trainings["killed"]
    assert ended.status == "SUCCEEDED", log_of(ended)[-4000:]
    attempts = [job.exit_code == 0 for job in ended.jobs if job.step == "train_policy"]
    assert attempts == [False, False, True]
    made = [one.tags["flow_run"] for one in life.versions()]
    assert made.count(f"RLHF/sfn-{ended.name}") == 1
    assert life.alarms["killed"] == []


def test_every_run_that_ended_has_released_the_lease(life: Life):
    s3 = life.cloud.machines.client("s3")
    key = f"metaflow/rlhf/leases/{NAME}.json"
    lease = json.loads(s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    assert lease["owner"] == ""


def test_a_consumer_follows_every_change(life: Life):
    killed = life.champions["killed"]
    after = {2: ["1"], 3: ["3", "2"]}[killed]
    assert [line.get("version", line) for line in life.seen] == ["1", "2", *after]


def test_the_audit_trail_tells_the_weeks_from_lineage_alone(life: Life):
    runs = [line for line in life.audit.splitlines() if line.startswith(("Retrain/", "RLHF/"))]
    heads = [line.split(": ", 1)[1] for line in runs]
    last = life.versions()[2]
    assert heads[:2] == ["training", "busy"] or heads[:2] == ["busy", "training"]
    assert heads[2:] == [
        "promoted version 1",
        "nothing new",
        "training",
        "promoted version 2",
        "training",
        "refused its reward model",
        "training",
        f"{'promoted' if life.champions['killed'] == 3 else 'refused'} version {last.version}",
        "nothing new",
    ]
    runs = [life.cloud.mlflow.get_run(one.run_id) for one in life.versions()]
    for digest in {run.data.tags["data/preferences"] for run in runs}:
        assert digest in life.audit
