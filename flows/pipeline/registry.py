"""The MLflow registry: one run per run of the flow, one version per policy."""

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import mlflow.transformers
import transformers
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from ppo_core.errors import ConfigError, ModelError

EXPERIMENT = "rlhf"
DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"

REQUIREMENTS = ("torch", "transformers", "accelerate")
"""What a consumer of the registered policy installs, at the versions it was made with."""

REWARD_REPORT = "reward-model"
"""Folder of the artifacts on the reward model."""

MAX_METRICS_PER_CALL = 1000
MAX_PARAMS_PER_CALL = 100
MAX_PARAM_CHARACTERS = 6000


def check_registry(name: str) -> None:
    """Refuse a registry that cannot be reached, or a name that it would not take.

    Raises:
        ConfigError: the name has a character that URIs of versions cannot hold.
        ModelError: the registry gives no answer.
    """
    if not name or any(character in name for character in "/:"):
        raise ConfigError(
            f"registered_model={name!r} must not be empty or hold '/' or ':': a version is found "
            "under models:/NAME/VERSION."
        )
    _connect()
    try:
        mlflow.MlflowClient().search_registered_models(max_results=1)
    except (MlflowException, OSError) as error:
        raise ModelError(
            f"The MLflow registry at {mlflow.get_registry_uri()} gives no answer: {error}. Set "
            "MLFLOW_TRACKING_URI to one that is running."
        ) from error


def start_run(run_name: str, settings: Mapping[str, Any]) -> str:
    """A new MLflow run with the settings as its parameters; returns its id."""
    _connect()
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
    _connect()
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


def find_policy(place: str) -> tuple[Path | str, Path | str]:
    """Where the model and the tokenizer of a folder, a hub id or an MLflow URI are.

    Raises:
        ModelError: the registry has no such version, or it is no model of transformers.
    """
    if not place.startswith(("models:/", "runs:/")):
        return place, place
    _connect()
    try:
        folder = Path(mlflow.artifacts.download_artifacts(place))
    except (MlflowException, OSError) as error:
        raise ModelError(
            f"{place} cannot be read from the registry at {mlflow.get_registry_uri()}: {error}. "
            "Check the name and the version, or set MLFLOW_TRACKING_URI."
        ) from error
    model, tokenizer = folder / "model", folder / "components" / "tokenizer"
    if not (model.is_dir() and tokenizer.is_dir()):
        raise ModelError(
            f"{place} holds no model and tokenizer of transformers as mlflow.transformers writes "
            "them. Name another version, or the folder of a model."
        )
    return model, tokenizer


def register_policy(
    policy: Path,
    name: str,
    *,
    run_id: str,
    updates: Sequence[Mapping[str, float]],
    numbers: Mapping[str, float],
    files: Sequence[Path],
    samples: Sequence[Mapping[str, str]],
) -> dict[str, str]:
    """Log a run of the flow and register its policy as a new version.

    Args:
        policy: folder of the model and its tokenizer.
        name: name of the registered model.
        run_id: the MLflow run that the version comes from.
        updates: metrics of each PPO update.
        numbers: figures of the whole run, by the names of their metrics.
        files: what else to keep beside the version.
        samples: prompts with their answers, kept as a table.

    Returns:
        name, version and uri of the registered version, and the id of the MLflow run.
    """
    _connect()
    # An absolute path is no id of the hub: MLflow would look there for a model card.
    folder = policy.resolve()
    with mlflow.start_run(run_id=run_id):
        _log_updates(run_id, updates)
        mlflow.log_metrics(dict(numbers))
        for file in files:
            mlflow.log_artifact(str(file))
        if samples:
            columns = {key: [sample[key] for sample in samples] for key in samples[0]}
            mlflow.log_table(columns, "samples.json")
        logged = mlflow.transformers.log_model(
            transformers_model={
                "model": transformers.AutoModelForCausalLM.from_pretrained(folder),
                "tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
            },
            name="policy",
            task="text-generation",
            pip_requirements=[_requirement(package) for package in REQUIREMENTS],
            registered_model_name=name,
        )
    number = str(logged.registered_model_version)
    return {"name": name, "version": number, "uri": f"models:/{name}/{number}", "run_id": run_id}


def log_summary(run_id: str, summary: Mapping[str, Any]) -> None:
    """Keep the summary of the flow beside the version that it is about."""
    _connect()
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


def _connect() -> None:
    """The usual environment variables decide; without them a file in the working directory."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("mlflow.transformers").setLevel(logging.ERROR)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(DEFAULT_TRACKING_URI)


def _log_settings(run_id: str, settings: Mapping[str, Any]) -> None:
    params = [
        Param(key, str(value)[:MAX_PARAM_CHARACTERS]) for key, value in flatten(settings).items()
    ]
    client = mlflow.MlflowClient()
    for start in range(0, len(params), MAX_PARAMS_PER_CALL):
        client.log_batch(run_id, params=params[start : start + MAX_PARAMS_PER_CALL])


def _log_updates(run_id: str, updates: Sequence[Mapping[str, float]]) -> None:
    """All metrics in few calls: one call an update would cost 58 ms against a server."""
    metrics = [
        Metric(key, value, timestamp=0, step=step)
        for step, update in enumerate(updates, start=1)
        for key, value in update.items()
    ]
    client = mlflow.MlflowClient()
    for start in range(0, len(metrics), MAX_METRICS_PER_CALL):
        client.log_batch(run_id, metrics=metrics[start : start + MAX_METRICS_PER_CALL])


def _requirement(package: str) -> str:
    """The version in use, without a local part such as +cpu, which no index may have."""
    return f"{package}=={version(package).partition('+')[0]}"
