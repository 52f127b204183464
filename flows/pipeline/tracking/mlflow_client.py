"""Connect to MLflow at MLFLOW_TRACKING_URI; by default, to a file in the working directory."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from pipeline.tracking.mlflow_facts import DEFAULT_TRACKING_URI
from ppo_core.errors import ConfigError, ModelError
from ppo_core.errors.deadline import answer_within
from ppo_core.io.atomic_files import FULL_DISK
from serving.database import check_database, sqlite_file

EXPERIMENT = "rlhf"
"""Name of the MLflow experiment for the runs of the flow."""

CHECK_SECONDS = 60.0
"""Maximum wait in seconds for the first answer of the registry. On the first run, MLflow needs some
seconds to create a database."""


def connect() -> MlflowClient:
    """Return a client of the tracking server and the registry, without sending a request.

    If the address names a sqlite file that does not exist, the database is created first.

    Raises:
        ModelError: the address names a file that is not a database of MLflow.
    """
    check_databases()
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("mlflow.transformers").setLevel(logging.ERROR)
    # This logger prints the traceback of every database error, although the error is also raised.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    for uri in {mlflow.get_tracking_uri(), mlflow.get_registry_uri()}:
        _create_database(uri)
    return MlflowClient()


def _create_database(uri: str) -> None:
    """Create the sqlite file of an address, whole or not at all; keep a file that exists.

    MLflow creates its tables in many transactions. If the process is killed between two of them,
    MLflow refuses the file forever.
    """
    path = sqlite_file(uri)
    if path is None or path.exists():
        return
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
    address = f"sqlite:///{unfinished}"
    try:
        MlflowClient(address, address).search_experiments(max_results=1)
        _publish(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _publish(file: Path, path: Path) -> None:
    """Give a file its final path, unless another process was faster."""
    try:
        # Making a link, unlike renaming, never replaces the database of another process.
        path.hardlink_to(file)
    except FileExistsError:
        return
    except OSError:
        file.rename(path)  # the file system has no hard links


def check_databases(*, must_exist: bool = False, is_written: bool = False) -> None:
    """Raise if the address of MLflow names a file that MLflow cannot use.

    Raises:
        ModelError: see `serving.database.check_database`.
    """
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(DEFAULT_TRACKING_URI)
    for uri in {mlflow.get_tracking_uri(), mlflow.get_registry_uri()}:
        check_database(uri, must_exist=must_exist, is_written=is_written)


def create_experiment(client: MlflowClient, title: str) -> str:
    """Return the id of an experiment; create the experiment if it does not exist.

    If the reply to the creation is lost, MLflow's client repeats the call. MLflow refuses the
    second call, and the created experiment is looked up.
    """
    try:
        return client.create_experiment(title)
    except MlflowException:
        made = client.get_experiment_by_name(title)
        if made is None:
            raise
        return made.experiment_id


def check_model_name(name: str) -> None:
    """Raise if the name of a registered model cannot be part of a URI or of a search.

    Raises:
        ConfigError: the name is empty or has an invalid character.
    """
    if not name or any(character in name for character in "/:'") or name.endswith("\\"):
        raise ConfigError(
            f"registered_model={name!r} is empty, contains '/', ':' or an apostrophe, or ends "
            "with a backslash. The URI of a version is models:/NAME/VERSION, and MLflow's "
            "searches quote the name, so choose another name."
        )


def check_registry(name: str) -> None:
    """Raise if the registry does not answer within CHECK_SECONDS, or the model name is invalid.

    Raises:
        ConfigError: see `check_model_name`.
        ModelError: the registry does not answer.
    """
    check_model_name(name)
    try:
        answer_within(CHECK_SECONDS, lambda: connect().search_registered_models(max_results=1))
    # ImportError: the driver of the database is not installed.
    except (MlflowException, SQLAlchemyError, OSError, ImportError) as error:
        raise ModelError(
            f"The MLflow registry at {mlflow.get_registry_uri()} gives no answer: {error}. "
            "Set MLFLOW_TRACKING_URI to a running registry."
        ) from error


@contextmanager
def explained() -> Iterator[None]:
    """Turn an error of MLflow into a ModelError; usable as a decorator.

    Raises:
        ModelError: MLflow refused a request or did not answer.
        OSError: the disk of this machine is full.
    """
    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise  # see `explained_full_disk`
        addresses = " or ".join(
            dict.fromkeys([mlflow.get_tracking_uri(), mlflow.get_registry_uri()])
        )
        raise ModelError(
            f"MLflow at {addresses} did not carry out a request: {error}. "
            "Fix the cause and try again. To continue a run of the flow, use "
            "`python flows/rlhf.py resume`; completed work is not repeated."
        ) from error
