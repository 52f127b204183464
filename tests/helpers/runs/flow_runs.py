"""Runs of the flow as a user starts them, and what they leave in MLflow."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
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
    """What it printed."""

    steps: dict[str, str]
    """What each step printed, as Metaflow's logs have it."""

    @property
    def number(self) -> str:
        """Metaflow's id of the run."""
        (number,) = re.findall(r"^Run (\d+)$", self.log, re.M)
        return number


def run_flow(folder: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> Ran:
    """`python flows/rlhf.py ARGUMENTS` in a folder, as root in a container: with no user's name.

    Variables of MLflow are only those of `variables`.
    """
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
        **(variables or {}),
    }
    ran = subprocess.run(
        [sys.executable, str(FLOW), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    log = ran.stdout + ran.stderr
    begun = re.search(r"^Run (\d+)$", log, re.M)
    return Ran(ran.returncode, log, step_logs(folder, begun[1]) if begun else {})


def step_logs(folder: Path, number: str = "*") -> dict[str, str]:
    """What each step of a run printed, as Metaflow has stored it; of all runs without a number."""
    logs: dict[str, str] = {}
    for file in sorted(folder.glob(f".metaflow/RLHF/{number}/*/*/*.log")):
        step = file.parts[-3]
        lines = re.sub(r"^\[MFLOG\|[^\]]*\]", "", file.read_text(), flags=re.M)
        logs[step] = logs.get(step, "") + lines
    return logs


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
