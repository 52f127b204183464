"""The way to MLflow: the usual environment variables, or a file in the working directory."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ppo_core.errors import ConfigError, ModelError
from serving.redaction import without_credentials

EXPERIMENT = "rlhf"
"""Where the runs of the flow are."""

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"

MAX_PARAM_CHARACTERS = 6000
"""What MLflow takes as the value of a parameter of a run."""


def connect() -> MlflowClient:
    """A client of the tracking server and its registry, which is not asked anything yet."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("mlflow.transformers").setLevel(logging.ERROR)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(DEFAULT_TRACKING_URI)
    return MlflowClient()


def create_experiment(client: MlflowClient, title: str) -> str:
    """Create an experiment and return its id; an experiment that is there already is taken.

    MLflow's client repeats a call whose reply was lost, and the second call is refused.
    """
    try:
        return client.create_experiment(title)
    except MlflowException:
        made = client.get_experiment_by_name(title)
        if made is None:
            raise
        return made.experiment_id


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
    try:
        connect().search_registered_models(max_results=1)
    # The driver of a database may not be installed.
    except (MlflowException, OSError, ImportError) as error:
        raise ModelError(
            f"The MLflow registry at {registry_address()} gives no answer: "
            f"{without_credentials(error)}. Set MLFLOW_TRACKING_URI to one that is running."
        ) from error


def registry_address() -> str:
    """Where the registry is, as it may be shown."""
    return without_credentials(mlflow.get_registry_uri())


@contextmanager
def explained() -> Iterator[None]:
    """Say in plain words what MLflow refused, or that it gave no answer; also as a decorator.

    Raises:
        ModelError: it did.
    """
    try:
        yield
    except (MlflowException, OSError) as error:
        raise ModelError(
            f"MLflow at {registry_address()} did not do what was asked of it: "
            f"{without_credentials(error)}. Mend the cause and try again, a run of the flow with "
            "`python flows/rlhf.py resume`: nothing is done twice."
        ) from error
