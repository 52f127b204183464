"""The way to MLflow: the usual environment variables, or a file in the working directory."""

import logging
import os

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ppo_core.errors import ConfigError, ModelError

EXPERIMENT = "rlhf"
"""Where the runs of the flow are."""

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"


def connect() -> MlflowClient:
    """A client of the tracking server and its registry, which is not asked anything yet."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("mlflow.transformers").setLevel(logging.ERROR)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(DEFAULT_TRACKING_URI)
    return MlflowClient()


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
    except (MlflowException, OSError) as error:
        raise ModelError(
            f"The MLflow registry at {mlflow.get_registry_uri()} gives no answer: {error}. Set "
            "MLFLOW_TRACKING_URI to one that is running."
        ) from error
