"""What MLflow keeps of a run of the flow."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Param

from pipeline.registry.connection import EXPERIMENT, connect

REWARD_REPORT = "reward-model"
"""Folder of the artifacts on the reward model."""

MAX_PARAMS_PER_CALL = 100
MAX_PARAM_CHARACTERS = 6000


def start_run(run_name: str, settings: Mapping[str, Any]) -> str:
    """A new MLflow run with the settings as its parameters; returns its id."""
    connect()
    mlflow.set_experiment(EXPERIMENT)
    with mlflow.start_run(run_name=run_name) as run:
        _log_settings(run.info.run_id, settings)
    return run.info.run_id


def log_reward_report(
    run_id: str,
    report: Mapping[str, Any],
    *,
    numbers: Mapping[str, float],
    page: str,
    figures: Mapping[str, bytes],
) -> None:
    """Keep what was measured on the reward model, and whether it may be trained against.

    Args:
        run_id: the MLflow run.
        report: all figures, the verdict and its reasons.
        numbers: those to compare runs by, by the names of their metrics.
        page: the same as an HTML page.
        figures: PNG files by their names.
    """
    connect()
    refused = not report["fit"] and not report["accepted_by_hand"]
    verdict = "fit" if report["fit"] else "refused" if refused else "accepted by hand"
    client = mlflow.MlflowClient()
    client.set_tag(run_id, "reward_model", verdict)
    mlflow.log_metrics(dict(numbers), run_id=run_id)
    client.log_dict(run_id, dict(report), f"{REWARD_REPORT}/report.json")
    client.log_text(run_id, page, f"{REWARD_REPORT}/report.html")
    with tempfile.TemporaryDirectory() as folder:
        for name, png in figures.items():
            path = Path(folder) / f"{name}.png"
            path.write_bytes(png)
            client.log_artifact(run_id, str(path), REWARD_REPORT)
    if refused:
        client.set_terminated(run_id, "FAILED")


def log_summary(run_id: str, summary: Mapping[str, Any]) -> None:
    """Keep the summary of the flow beside the version that it is about."""
    connect()
    mlflow.MlflowClient().log_dict(run_id, dict(summary), "summary.json")


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, the names joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _log_settings(run_id: str, settings: Mapping[str, Any]) -> None:
    params = [
        Param(key, str(value)[:MAX_PARAM_CHARACTERS]) for key, value in flatten(settings).items()
    ]
    client = mlflow.MlflowClient()
    for start in range(0, len(params), MAX_PARAMS_PER_CALL):
        client.log_batch(run_id, params=params[start : start + MAX_PARAMS_PER_CALL])
