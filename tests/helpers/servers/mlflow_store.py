"""MLflow in a test: a fast way to create a database, and a context that tracks to it."""

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
    """Write an empty MLflow database and return its URI.

    MLflow itself creates the tables of its first release and runs every migration, which is slow.
    """
    file.write_bytes(_empty_database())
    return f"sqlite:///{file}"


@cache
def _empty_database() -> bytes:
    # In memory if possible: each of hundreds of statements would wait for the disk.
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        file = Path(folder) / "mlflow.db"
        commands(["upgrade", f"sqlite:///{file}"], standalone_mode=False)
        return file.read_bytes()


@contextmanager
def tracking_to(uri: str, *, retries: int = 2) -> Iterator[None]:
    """Make MLflow in this process use `uri`, without the state of other tests, and restore it.

    A request without a reply is repeated at once, `retries` times.
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
        # The state that mlflow.set_tracking_uri and mlflow.set_experiment set.
        patch("mlflow.tracking._tracking_service.utils._tracking_uri", None),
        patch("mlflow.tracking.fluent._active_experiment_id", None),
    ):
        os.environ.pop("MLFLOW_EXPERIMENT_ID", None)
        try:
            yield
        finally:
            mlflow.end_run()
