"""The configuration that infra/mlflow/server.sh writes for MLflow's server."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT


def test_a_percent_sign_in_the_address_of_the_database_reaches_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from mlflow.server.auth.config import read_auth_config

    database = "postgresql+psycopg://mlflow:p%40ss@host:5432/mlflow"
    # In place of the server, a program that ends at once.
    (tmp_path / "mlflow").symlink_to("/bin/true")
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "DATABASE": database,
        "ARTIFACT_ROOT": "s3://bucket/mlflow",
    }
    subprocess.run([ROOT / "infra" / "mlflow" / "server.sh"], env=environment, check=True)
    monkeypatch.setenv("MLFLOW_AUTH_CONFIG_PATH", str(tmp_path / "auth.ini"))
    assert read_auth_config().database_uri == database
