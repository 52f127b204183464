"""`registry.py audit` prints the life of a model from what MLflow has recorded."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from mlflow import MlflowClient

import registry
from pipeline.inputs.lineage import FLOW_RUN
from pipeline.registry.change_champion import record_decision
from pipeline.registry.sync_aliases import sync_aliases
from pipeline.tracking.decided_runs import record_retrain
from pipeline.tracking.mlflow_runs import start_runs

NAME = "rlhf-policy"

LINEAGE = {"data/preferences": "3fa9", "settings_digest": "77", "git_commit": "c0ffee"}


def train(client: MlflowClient, number: int, **tags: str) -> str:
    lineage = LINEAGE | {FLOW_RUN: f"RLHF/{number}", "python": "3.11.7"}
    run = start_runs(NAME, f"RLHF/{number}", {"registered_model": NAME}, lineage, [])["parent"]
    for name, value in tags.items():
        client.set_tag(run, name, value)
    return run


def now() -> datetime:
    return datetime.now(UTC)


def heads(said: str) -> list[str]:
    return [line for line in said.splitlines() if line and not line.startswith(" ")]


def test_every_run_is_printed_with_its_reason_and_origin(
    mlflow_client: MlflowClient, tmp_path: Path, capsys
):
    client = mlflow_client
    client.create_registered_model(NAME)
    record_retrain(NAME, "Retrain/1", "training", "New: no champion.", LINEAGE, now())
    run = train(client, 1, promotion="promoted", version="1")
    tags = {"promotion_reasons": "It beats SFT.\nAnd the references."}
    client.create_model_version(NAME, "s3://bucket/policy", run_id=run, tags=tags)
    record_retrain(NAME, "Retrain/2", "nothing new", "RLHF/1 made the champion.", LINEAGE, now())
    train(client, 2, outcome="refused", ended_early="The reward model likes length.")
    train(client, 3)
    record_retrain("another", "Retrain/9", "busy", "", {}, now())
    assert registry.main(["audit", NAME]) == 0
    said = capsys.readouterr().out
    assert heads(said) == [
        "Retrain/1: training",
        "RLHF/1: promoted version 1",
        "Retrain/2: nothing new",
        "RLHF/2: refused its reward model",
        "RLHF/3: has not ended",
    ]
    for reason in (
        "New: no champion.",
        "It beats SFT.\n    And the references.",
        "RLHF/1 made the champion.",
        "The reward model likes length.",
    ):
        assert f"\n    {reason}\n" in said
    assert (
        said.count("    data/preferences 3fa9\n    git_commit c0ffee\n    settings_digest 77") == 5
    )
    # The image is not an input.
    assert "python" not in said


def test_a_run_keeps_its_reasons_after_a_person_decided(mlflow_client: MlflowClient, capsys):
    mlflow_client.create_registered_model(NAME)
    for number, reason in ((1, "It beats SFT."), (2, "It beats version 1.")):
        run = train(mlflow_client, number, promotion="promoted", version=str(number))
        mlflow_client.create_model_version(NAME, "s3://bucket/policy", run_id=run)
        by, state = f"run RLHF/{number}", sync_aliases(NAME)
        record_decision(
            NAME, version=number, promote=True, reasons=[reason], by=by, key=by, after=state
        )
    assert registry.main(["rollback", NAME, "--reason", "It swears."]) == 0
    capsys.readouterr()
    assert registry.main(["audit", NAME]) == 0
    said = capsys.readouterr().out
    assert "\n    It beats SFT.\n" in said
    assert "\n    It beats version 1.\n" in said
    assert "It swears." not in said


@pytest.mark.usefixtures("mlflow_client")
def test_a_model_without_runs_is_named(capsys):
    assert registry.main(["audit", NAME]) == 0
    assert capsys.readouterr().out == f"No run for {NAME} is recorded.\n"
