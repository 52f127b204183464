"""Weeks of production: runs of the built-in task, one registry, and a consumer that follows it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlflow
import pytest

from tests.helpers.paths import ROOT
from tests.helpers.runs.champion_follower import champion_follower
from tests.helpers.servers.servers import mlflow_server, s3

NAME = "summarizer"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPT = "title : first post here . i lost the ring . i felt sad . tl;dr :"


@dataclass(frozen=True)
class Weeks:
    """What three runs, a rollback and a repeated run left behind."""

    client: mlflow.MlflowClient
    summaries: list[dict[str, Any]]
    rollback: str
    history: str
    seen: list[dict[str, str]]


@pytest.fixture(scope="module")
def weeks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weeks]:
    folder = tmp_path_factory.mktemp("weeks")
    with s3() as storage, mlflow_server(folder, "s3://artifacts/weeks", storage) as server:
        environment = {key: value for key, value in os.environ.items() if "MLFLOW" not in key}
        environment |= {
            **storage,
            "MLFLOW_TRACKING_URI": server.url,
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
            "PYTHONPATH": str(ROOT),
        }

        def command(*arguments: str) -> str:
            ran = subprocess.run(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr
            return ran.stdout

        def week(number: int, *arguments: str) -> dict[str, Any]:
            written = folder / f"{number}.json"
            command(
                *(str(ROOT / "flows/rlhf.py"), *arguments, "run", "--summary-json", str(written)),
                *(() if arguments else ("--registered-model", NAME)),
                *(("--total-episodes", EPISODES[number]) if not arguments else ()),
            )
            return json.loads(written.read_text())

        summaries = [week(1)]
        with champion_follower(NAME, PROMPT, folder, environment) as follower:
            follower.wait_for("1")
            summaries += [week(2), week(3)]
            follower.wait_for("3")
            rollback = command(str(ROOT / "flows/registry.py"), "rollback", NAME)
            follower.wait_for("1")
        history = command(str(ROOT / "flows/registry.py"), "history", NAME)
        os.environ.update(storage)
        client = mlflow.MlflowClient(server.url)
        settings = client.download_artifacts(
            summaries[1]["model"]["run_id"], "settings.toml", str(folder)
        )
        # Otherwise the fourth week would reuse the policy of the second.
        for trained in folder.glob("outputs/cache/policy-*"):
            shutil.rmtree(trained)
        summaries.append(week(4, "--config", "settings", settings))
        yield Weeks(client, summaries, rollback, history, follower.seen)


EPISODES = {1: "2048", 2: "512", 3: "8192"}
"""Responses that each run samples: the second is trained less than the champion it meets."""


def test_the_first_model_is_judged_against_the_policy_that_training_began_with(weeks: Weeks):
    first = weeks.summaries[0]
    assert "ppo_vs_champion" not in first["win_rate"]
    assert first["promotion"]["action"] == "promoted"
    assert first["promotion"]["champion"] == 1


def test_a_candidate_worse_than_the_champion_is_refused_with_reasons(weeks: Weeks):
    second = weeks.summaries[1]
    assert second["win_rate"]["ppo_vs_champion"]["low"] < 0.5
    assert second["promotion"]["action"] == "refused"
    assert second["promotion"]["champion"] == 1
    tags = weeks.client.get_model_version(NAME, "2").tags
    assert tags["promotion"] == "refused"
    assert "against the champion" in tags["promotion_reasons"]


def test_a_candidate_better_than_the_champion_is_promoted(weeks: Weeks):
    third = weeks.summaries[2]
    assert third["win_rate"]["ppo_vs_champion"]["low"] > 0.5
    assert third["promotion"]["action"] == "promoted"
    assert third["promotion"]["champion"] == 3


def test_a_rollback_brings_the_earlier_champion_back(weeks: Weeks):
    assert weeks.client.get_model_version_by_alias(NAME, "champion").version == "1"
    assert weeks.client.get_model_version(NAME, "3").tags["promotion"] == "withdrawn"


def test_the_consumer_saw_every_change_and_no_error(weeks: Weeks):
    assert [line.get("version", line) for line in weeks.seen] == ["1", "3", "1"]
    assert weeks.seen[0]["answer"] == weeks.seen[2]["answer"]


def test_the_history_has_every_decision(weeks: Weeks):
    for words in ("promoted", "refused", "rolled back"):
        assert words in weeks.history


def test_artifacts_are_in_the_bucket(weeks: Weeks):
    run = weeks.client.get_run(weeks.summaries[0]["model"]["run_id"])
    assert run.info.artifact_uri.startswith("s3://artifacts/weeks")


def test_the_settings_on_record_repeat_the_run_bit_for_bit(weeks: Weeks):
    second, repeated = (weeks.summaries[number]["model"]["version"] for number in (1, 3))
    assert repeated == "4"
    versions = [weeks.client.get_model_version(NAME, number) for number in (second, repeated)]
    assert len({version.tags["model/policy"] for version in versions}) == 1
