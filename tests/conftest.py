"""Fixtures that several test files share."""

import gc
import os
import tempfile
from contextlib import chdir
from pathlib import Path

import pytest

# Before the hub's client is imported, which would ask five times for what is not here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The cache of rows is shared by the processes of one run of the tests.
os.environ.setdefault("HF_DATASETS_CACHE", tempfile.mkdtemp(prefix="datasets-"))


def pytest_collection_finish() -> None:
    """Keep the garbage collector off what the imports made, which saves 5 % of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def registry_of_one_file():
    """Keep the MLflow server that the tests of a file connect to from the programs of later files.

    MLflow writes the server that a process connects to into its environment.
    """
    before = os.environ.get("MLFLOW_TRACKING_URI")
    yield
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    if before is not None:
        os.environ["MLFLOW_TRACKING_URI"] = before


@pytest.fixture
def mlflow_client(tmp_path: Path):
    """A client of an MLflow of this test's own, to which all tracking goes."""
    mlflow = pytest.importorskip("mlflow")
    from tests.helpers.servers.mlflow_store import tracking_to, write_database

    with chdir(tmp_path), tracking_to(write_database(tmp_path / "mlflow.db")):
        yield mlflow.MlflowClient()


@pytest.fixture
def onednn_tried_anew():
    """Whether oneDNN's products are exact is found out once more, in the test and behind it."""
    from ppo_core.models.kernels import matmul_backend

    matmul_backend._onednn_is_exact.cache_clear()
    yield
    matmul_backend._onednn_is_exact.cache_clear()
