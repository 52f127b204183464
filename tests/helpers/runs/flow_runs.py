"""Runs of the flow as a user starts them, and what they leave in MLflow."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mlflow

from tests.helpers.paths import ROOT

FLOW = ROOT / "flows" / "rlhf.py"


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    log: str


def run_flow(folder: Path, *arguments: str) -> Ran:
    """`python flows/rlhf.py ARGUMENTS` in a folder, as root in a container: with no user's name."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("USER", "USERNAME", "LOGNAME", "SUDO_USER", "METAFLOW_USER")
        and not key.startswith("MLFLOW_")
    }
    environment |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
    }
    ran = subprocess.run(
        [sys.executable, str(FLOW), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return Ran(ran.returncode, ran.stdout + ran.stderr)


def client_of(folder: Path) -> mlflow.MlflowClient:
    return mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def runs_of(folder: Path, flow_run: str) -> dict[str, mlflow.entities.Run]:
    """The runs in MLflow of one run of the flow, by step."""
    client = client_of(folder)
    experiment = client.get_experiment_by_name("rlhf")
    found = client.search_runs([experiment.experiment_id], f"tags.flow_run = '{flow_run}'")
    runs = {run.data.tags["step"]: run for run in found}
    assert len(runs) == len(found)
    return runs


def artifacts_of(folder: Path, run: mlflow.entities.Run, path: str | None = None) -> set[str]:
    return {file.path for file in client_of(folder).list_artifacts(run.info.run_id, path)}
