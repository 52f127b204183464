"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest

# Before the hub's client is imported, which would ask five times for what is not here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A client of an MLflow of this test's own, to which all tracking goes."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri(None)
    mlflow.set_experiment("Default")  # another test of this process may have chosen one
    yield mlflow.MlflowClient()
    mlflow.end_run()
    mlflow.set_tracking_uri(None)
