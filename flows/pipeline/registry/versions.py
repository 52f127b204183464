"""Policies as versions of a registered model."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import mlflow
import mlflow.transformers
import transformers
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from pipeline.registry.connection import connect
from ppo_core.errors import ModelError

REQUIREMENTS = ("torch", "transformers", "accelerate")
"""What a consumer of the registered policy installs, at the versions it was made with."""

MAX_METRICS_PER_CALL = 1000


def find_policy(place: str) -> tuple[Path | str, Path | str]:
    """Where the model and the tokenizer of a folder, a hub id or an MLflow URI are.

    Raises:
        ModelError: the registry has no such version, or it is no model of transformers.
    """
    if not place.startswith(("models:/", "runs:/")):
        return place, place
    connect()
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
    connect()
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
