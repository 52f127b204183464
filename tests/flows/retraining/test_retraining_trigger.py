"""Retrain compares what a run would have today with the champion and with every decided run."""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from mlflow import MlflowClient

from pipeline.inputs.lineage import FLOW_RUN
from pipeline.storage import workspace
from pipeline.tracking.decided_runs import MISSING_VERDICTS
from pipeline.tracking.mlflow_runs import start_runs
from ppo_core.errors import ConfigError, DataError
from retraining.retraining_trigger import NewInputs, find_new_inputs
from tests.flows.retraining.conftest import Bucket
from tests.helpers.inputs.pipeline_inputs import write_model
from tests.helpers.slow_cases import slow

NAME = "rlhf-policy"

pytestmark = pytest.mark.usefixtures("mlflow_client")

PAIR = {"prompt": "w2 w3", "chosen": "w1 w1", "rejected": "w4 w5"}


def look(table: Mapping[str, Any]) -> NewInputs:
    # Each look is a process of its own; within one, an address is read once.
    with patch.dict(workspace._fetched, clear=True):
        return find_new_inputs(table, "Retrain/1")


def decide(client: MlflowClient, found: NewInputs, number: int, **tags: str) -> str:
    """Record a run with the lineage that was found, and how it ended."""
    lineage = found.lineage | {FLOW_RUN: f"RLHF/{number}"}
    run = start_runs(NAME, f"RLHF/{number}", {"registered_model": NAME}, lineage, [])["parent"]
    for name, value in tags.items():
        client.set_tag(run, name, value)
    return run


def make_champion(client: MlflowClient, found: NewInputs, number: int) -> None:
    """Register a version with the lineage that was found as the champion."""
    run = decide(client, found, number, promotion="promoted", version="1")
    client.create_registered_model(NAME)
    tags = found.lineage | {FLOW_RUN: f"RLHF/{number}"}
    made = client.create_model_version(NAME, "s3://bucket/policy", run_id=run, tags=tags)
    client.set_registered_model_alias(NAME, "champion", made.version)


def test_everything_is_new_without_a_champion(table: dict[str, Any]):
    found = look(table)
    assert (found.new, found.seen) == (["no champion"], "")
    assert "data/preferences" in found.lineage
    # The names of the inputs stay those of the user.
    assert found.settings.preferences == table["preferences"]


def test_nothing_is_new_if_the_champion_had_equal_inputs(
    table: dict[str, Any], mlflow_client: MlflowClient
):
    make_champion(mlflow_client, look(table), 7)
    found = look(table)
    assert (found.new, found.seen) == (
        [],
        "RLHF/7 made the champion, version 1, from equal inputs.",
    )


def test_a_champion_that_somebody_registered_in_mlflow_had_equal_inputs_too(
    table: dict[str, Any], mlflow_client: MlflowClient
):
    run = decide(mlflow_client, look(table), 7)
    mlflow_client.create_registered_model(NAME)
    made = mlflow_client.create_model_version(NAME, "s3://bucket/policy", run_id=run)
    mlflow_client.set_registered_model_alias(NAME, "champion", made.version)
    assert look(table).seen == "An unknown run made the champion, version 1, from equal inputs."


def test_a_champion_whose_run_is_gone_has_unknown_inputs(
    table: dict[str, Any], mlflow_client: MlflowClient
):
    found = look(table)
    run = decide(mlflow_client, found, 7, promotion="promoted", version="1")
    mlflow_client.create_registered_model(NAME)
    tags = {FLOW_RUN: "RLHF/7", "data/eval-prompts": found.lineage["data/eval-prompts"]}
    made = mlflow_client.create_model_version(NAME, "s3://bucket/policy", run_id=run, tags=tags)
    mlflow_client.set_registered_model_alias(NAME, "champion", made.version)
    assert look(table).new == []
    mlflow_client._tracking_client.store._hard_delete_run(run)
    missing = "MLflow no longer has the run with the inputs of the champion, version 1"
    assert look(table).new == [missing]
    # One training is enough.
    decide(mlflow_client, found, 8, promotion="refused", version="2")
    assert look(table).seen == "RLHF/8 refused version 2 from equal inputs."


def test_a_file_that_is_added_below_the_prefix_is_new(
    table: dict[str, Any], bucket: Bucket, mlflow_client: MlflowClient
):
    make_champion(mlflow_client, look(table), 7)
    bucket.write("pairs/second.jsonl", [PAIR] * 20)
    found = look(table)
    assert found.seen == ""
    # The held-out pairs are split off the same rows.
    assert found.new == ["data/preferences changed", "data/preferences-test changed"]


@pytest.mark.parametrize(
    ("change", "new"),
    [
        ({"seed": 5}, ["settings changed", "seed changed"]),
        ({"promotion": {"max_kl": 19.0}}, ["settings changed"]),
    ],
)
def test_a_changed_setting_is_new(
    table: dict[str, Any], mlflow_client: MlflowClient, change: dict[str, Any], new: list[str]
):
    make_champion(mlflow_client, look(table), 7)
    assert set(look(table | change).new) == set(new)


def test_labels_judges_and_guards_are_inputs_too(
    table: dict[str, Any], mlflow_client: MlflowClient, tmp_path: Path
):
    code, labels = tmp_path / "own_judge.py", tmp_path / "labels.jsonl"
    code.write_text(
        "def judge(prompts, pairs):\n    return ['tie'] * len(pairs)\n\n"
        "def guard(prompts, responses):\n    return [1.0] * len(prompts)\n"
    )
    vote = {"prompt": "w2 w3", "first": "w1", "second": "w4", "label": "tie"}
    labels.write_text(json.dumps(vote) + "\n")
    table |= {
        "judge": f"python:{code}:judge",
        "evaluation": {"human_labels": str(labels)},
        "promotion": {"guards": {"functions": {"kind": f"python:{code}:guard"}}},
    }
    make_champion(mlflow_client, look(table), 7)
    assert look(table).new == []
    labels.write_text(json.dumps(vote | {"label": "first"}) + "\n")
    assert look(table).new == ["data/human-labels changed"]
    labels.write_text(json.dumps(vote) + "\n")
    code.write_text(code.read_text().replace("tie", "first"))
    assert set(look(table).new) == {"judge changed", "guard/kind changed"}


def test_another_policy_is_new_and_so_is_a_changed_one(
    table: dict[str, Any], mlflow_client: MlflowClient, tmp_path: Path
):
    made = look(table)
    make_champion(mlflow_client, made, 7)
    copied = Path(write_model(tmp_path / "policy"))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"initializer_range": 0.5}))
    found = look(table | {"policy": str(copied)})
    assert {"policy changed", "settings changed"} == set(found.new)


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ({"promotion": "refused", "version": "3"}, "RLHF/8 refused version 3 from equal inputs."),
        pytest.param(
            {"outcome": "refused"},
            "RLHF/8 refused its reward model from equal inputs.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"promotion": "withdrawn", "version": "3"},
            "RLHF/8 withdrawn version 3 from equal inputs.",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_inputs_on_which_a_run_decided_are_not_tried_again(
    table: dict[str, Any],
    bucket: Bucket,
    mlflow_client: MlflowClient,
    tags: dict[str, str],
    words: str,
):
    make_champion(mlflow_client, look(table), 7)
    bucket.write("pairs/second.jsonl", [PAIR] * 20)
    decide(mlflow_client, look(table), 8, **tags)
    assert look(table).seen == words


@pytest.mark.parametrize(
    "tags",
    [
        {"outcome": "failed"},
        {"promotion": "refused", "version": "3", MISSING_VERDICTS: "ppo_vs_sft"},
        *slow({}, {"outcome": "killed"}),
    ],
)
def test_inputs_on_which_no_run_could_decide_are_tried_again(
    table: dict[str, Any], mlflow_client: MlflowClient, tags: dict[str, str]
):
    decide(mlflow_client, look(table), 8, **tags)
    assert look(table).new == ["no champion"]


def test_verdicts_that_are_missing_again_are_asked_for_only_once_more(
    table: dict[str, Any], mlflow_client: MlflowClient
):
    found = look(table)
    tags = {"promotion": "refused", "version": "3", MISSING_VERDICTS: "ppo_vs_sft"}
    for number in (8, 9):
        assert look(table).seen == ""
        decide(mlflow_client, found, number, **tags)
    assert look(table).seen == "RLHF/8 refused version 3 from equal inputs."


def test_after_the_registry_is_restored_what_was_decided_since_is_tried_again(
    table: dict[str, Any], bucket: Bucket, mlflow_client: MlflowClient, tmp_path: Path
):
    """The runbook says so: the store keeps the models, and the backup has no decision on them."""
    make_champion(mlflow_client, look(table), 7)
    copy_database(tmp_path / "mlflow.db", tmp_path / "backup.db")
    bucket.write("pairs/second.jsonl", [PAIR] * 20)
    decide(mlflow_client, look(table), 8, promotion="refused", version="2")
    assert look(table).seen
    copy_database(tmp_path / "backup.db", tmp_path / "mlflow.db")
    assert look(table).new == ["data/preferences changed", "data/preferences-test changed"]


def copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as written:
        read.backup(written)


def test_an_image_with_other_packages_is_not_new(
    table: dict[str, Any], mlflow_client: MlflowClient
):
    found = look(table)
    found.lineage["packages_digest"] = "of another image"
    make_champion(mlflow_client, found, 7)
    assert look(table).new == []


def test_wrong_settings_and_missing_data_end_the_look(table: dict[str, Any], bucket: Bucket):
    with pytest.raises(ConfigError, match="preferencs"):
        look(table | {"preferencs": "pairs.jsonl"})
    with pytest.raises(DataError, match=bucket.address("nothing")):
        look(table | {"prompts": bucket.address("nothing")})
