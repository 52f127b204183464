"""An MLflow for a test: a database made in no time, and tracking that goes there for a while."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import mlflow
from mlflow.db import commands


def write_database(file: Path) -> str:
    """A database of MLflow with nothing in it; returns its URI.

    MLflow itself would take seconds for each: it makes the tables of its first release and
    changes them migration by migration.
    """
    file.write_bytes(_empty_database())
    return f"sqlite:///{file}"


@cache
def _empty_database() -> bytes:
    # In memory where that is a folder: hundreds of statements would each wait for the disk.
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        file = Path(folder) / "mlflow.db"
        commands(["upgrade", f"sqlite:///{file}"], standalone_mode=False)
        return file.read_bytes()


@contextmanager
def tracking_to(uri: str, *, retries: int = 2) -> Iterator[None]:
    """All MLflow of this process is there, and knows nothing of other tests; then it is as it was.

    A request that got no reply is sent again at once, `retries` times.
    """
    environment = {
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
        "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(retries),
    }
    with (
        patch.dict(os.environ, environment),
        # What mlflow.set_tracking_uri and mlflow.set_experiment leave behind.
        patch("mlflow.tracking._tracking_service.utils._tracking_uri", None),
        patch("mlflow.tracking.fluent._active_experiment_id", None),
    ):
        os.environ.pop("MLFLOW_EXPERIMENT_ID", None)
        try:
            yield
        finally:
            mlflow.end_run()
