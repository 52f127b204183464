"""Read and set the aliases and tags of versions; deleted versions are ignored."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from mlflow import MlflowClient, get_registry_uri
from mlflow.exceptions import MlflowException

from pipeline.inputs.lineage import is_input
from pipeline.registry.decisions import shortened
from pipeline.tracking.mlflow_client import connect, explained
from pipeline.tracking.mlflow_facts import MAX_TAG_CHARACTERS
from ppo_core.errors import ModelError

CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous-champion", "challenger"


@dataclass(frozen=True)
class VersionNotes:
    """Tags and win rates of a version in MLflow."""

    tags: Mapping[str, str]
    """Tags of the version, and the tags of its MLflow run that describe inputs of the run."""

    win_rates: Mapping[str, float]
    """Win rates in the MLflow run of the version, by contest."""

    run_id: str | None
    """Id of the MLflow run of the version; None if the version was deleted or has no run."""


@explained()
def require_registered(name: str) -> None:
    """Raise if the registry has no such model.

    Raises:
        ModelError: the name is unknown; the message names other registered models.
    """
    client = connect()
    try:
        client.get_registered_model(name)
    except MlflowException as error:
        raise_unless_missing(error)
        others = [repr(found.name) for found in client.search_registered_models(max_results=5)]
        raise ModelError(
            f"There is no registered model {name!r} in {get_registry_uri()}, which has "
            f"{', '.join(others) or 'none'}. Check the name, or set MLFLOW_TRACKING_URI to the "
            "registry that holds the model."
        ) from error


@explained()
def read_aliases(name: str) -> dict[str, int]:
    """Return the version of each alias of a registered model; empty if there is no such model."""
    aliases: Mapping[str, str] = {}
    with unless_deleted():
        aliases = connect().get_registered_model(name).aliases
    return {alias: int(version) for alias, version in aliases.items()}


@explained()
def read_version(name: str, version: int) -> VersionNotes:
    """Return the tags and win rates of a version; both are empty if the version was deleted."""
    client = connect()
    tags: Mapping[str, str] = {}
    metrics: Mapping[str, float] = {}
    run_id = None
    with unless_deleted():
        found = client.get_model_version(name, str(version))
        tags = found.tags
        run_id = found.run_id or None
        if run_id:
            run = client.get_run(run_id).data
            metrics = run.metrics
            tags = {name: one for name, one in run.tags.items() if is_input(name)} | tags
    rates = {
        metric.removeprefix("win_rate/").removesuffix("/rate"): value
        for metric, value in sorted(metrics.items())
        if metric.startswith("win_rate/") and metric.endswith("/rate")
    }
    return VersionNotes(tags, rates, run_id)


def set_tags(client: MlflowClient, name: str, version: int, tags: Mapping[str, str]) -> None:
    """Set tags of a version; values that are too long are cut and marked as cut."""
    with unless_deleted():
        for key, value in tags.items():
            text = shortened(value, MAX_TAG_CHARACTERS)
            client.set_model_version_tag(name, str(version), key, text)


def set_alias(client: MlflowClient, name: str, alias: str, version: int | None) -> None:
    """Point an alias at a version; None deletes the alias."""
    with unless_deleted():
        if version is None:
            client.delete_registered_model_alias(name, alias)
        else:
            client.set_registered_model_alias(name, alias, str(version))


def exists(client: MlflowClient, name: str, version: int) -> bool:
    """Return whether a version exists."""
    try:
        client.get_model_version(name, str(version))
    except MlflowException as error:
        raise_unless_missing(error)
        return False
    return True


@contextmanager
def unless_deleted() -> Iterator[None]:
    """Ignore the error that a version or a registered model does not exist."""
    try:
        yield
    except MlflowException as error:
        raise_unless_missing(error)


def raise_unless_missing(error: MlflowException) -> None:
    """Raise the error unless its code is RESOURCE_DOES_NOT_EXIST."""
    if error.error_code != "RESOURCE_DOES_NOT_EXIST":
        raise error
