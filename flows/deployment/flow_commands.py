"""Call Metaflow's commands of both flows with the files of a deployment."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployment.deployment import Deployment
from deployment.deployment_file import read_deployment
from metaflow_glue.execution_parameters import ARGO, STEP_FUNCTIONS
from ppo_core.errors import ConfigError, ProcessError
from ppo_core.errors.redaction import MASK, mask_secrets
from ppo_core.io.text_files import read_toml_file

FILES = {"RLHF": "rlhf.py", "Retrain": "retrain.py"}
"""Flow -> its file; RLHF, which Retrain starts, comes first."""

COMMANDS = {"argo": "argo-workflows", "step-functions": "step-functions"}
"""Scheduler -> Metaflow's name of its commands."""

SCHEDULES = "METAFLOW_ARGO_WORKFLOWS_USE_SCHEDULES"
"""Variable by which Metaflow writes times in the only form that Argo 4 reads."""

ANOTHERS = "Try again with the correct production token."
"""Message by which Metaflow refuses to change what another user has deployed."""

MAX_LINES = 12
"""Last lines of the messages of a command that failed, which its error shows."""


@dataclass(frozen=True)
class DeploymentFiles:
    """A deployment, and the files that say it."""

    path: Path
    deployment: Deployment
    authorize: str = ""
    """Metaflow's production token of a deployment that somebody else made; empty without one."""

    @property
    def settings(self) -> Path:
        """Path of the settings file."""
        return self.path.parent / self.deployment.settings


def read_deployment_file(path: Path, authorize: str = "") -> DeploymentFiles:
    """Return the deployment that a file says.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or see `read_deployment`.
    """
    tables = read_toml_file(path, ConfigError)
    if not tables:
        raise ConfigError(f"'{path}' is empty. infra/deployments has an example of each scheduler.")
    return DeploymentFiles(path, read_deployment(tables), authorize)


def create_flow(files: DeploymentFiles, flow: str, *words: str) -> str:
    """Deploy a flow, or compile it only, and return what Metaflow prints.

    Raises:
        ProcessError: Metaflow refuses the flow.
    """
    limit = round(3600 * files.deployment.timeout_hours)
    limits = ["--workflow-timeout", str(limit)] if limit else []
    return run_flow_command(files, flow, "create", *limits, *_authorization(files), *words)


def delete_flow(files: DeploymentFiles, flow: str) -> None:
    """Delete a flow from the scheduler.

    Raises:
        ProcessError: the scheduler refuses it.
    """
    run_flow_command(files, flow, "delete", *_authorization(files))


def start_flow(files: DeploymentFiles, flow: str) -> None:
    """Start a deployed flow.

    Raises:
        ProcessError: the scheduler refuses it.
    """
    run_flow_command(files, flow, "trigger")


def compile_flow(files: DeploymentFiles, flow: str) -> dict[str, Any]:
    """Return what the scheduler would store of a flow; nothing is applied.

    Metaflow stores the code package, and registers the jobs of AWS Batch, while it compiles.

    Raises:
        ConfigError: what the scheduler would store holds a secret in clear.
        ProcessError: Metaflow refuses the flow.
    """
    text = create_flow(files, flow, "--only-json")
    compiled: dict[str, Any] = json.loads(text)
    if ARGO.search(text) or STEP_FUNCTIONS.search(text):
        raise ProcessError(
            f"Metaflow compiled the flow {flow} so that the shell of its first job would execute "
            "the parameters of an execution. Install the version of Metaflow that pyproject.toml "
            "names."
        )
    # The command masks secrets in what it prints.
    if places := sorted(set(_places_of_mask(compiled, flow))):
        raise ConfigError(
            f"The scheduler would store a secret in clear, in {', '.join(places)}. Unset the "
            "environment variable that holds it. On Argo, METAFLOW_ARGO_WORKFLOWS_ENV_VARS_TO_SKIP "
            "leaves out what a secret of Kubernetes gives to the steps."
        )
    return compiled


def run_flow_command(files: DeploymentFiles, flow: str, *words: str) -> str:
    """Run a command of a flow for the scheduler, and return what it prints.

    Raises:
        ProcessError: the command fails.
    """
    deployment = files.deployment
    options = ["--config", "settings", str(files.settings), "--config", "deployment"]
    command = [FILES[flow], *options, str(files.path), COMMANDS[deployment.scheduler], *words]
    file = str(Path(__file__).parents[1] / command[0])
    ran = subprocess.run(
        [sys.executable, file, *command[1:]],
        env={**os.environ, **_variables(deployment)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        messages = mask_secrets(ran.stderr).strip().splitlines()[-MAX_LINES:]
        if ANOTHERS in ran.stderr:
            messages.append(
                f"Somebody else has deployed this flow. `python flows/deploy.py {files.path} "
                "--status` prints its token: repeat your command with --authorize TOKEN."
            )
        raise ProcessError(
            f"`python flows/{' '.join(command)}` failed. Correct what it says:\n"
            + "\n".join(messages)
        )
    return ran.stdout


def _authorization(files: DeploymentFiles) -> list[str]:
    return ["--authorize", files.authorize] if files.authorize else []


def _variables(deployment: Deployment) -> dict[str, str]:
    """Return the environment in which a command deploys where the file says."""
    chosen = {SCHEDULES: os.environ.get(SCHEDULES, "True")}
    if deployment.namespace:
        chosen["METAFLOW_KUBERNETES_NAMESPACE"] = deployment.namespace
    return chosen


def _places_of_mask(value: Any, place: str) -> Iterator[str]:
    """Yield the names of the values in which a secret was masked."""
    if isinstance(value, str):
        if MASK in value:
            yield place
    elif isinstance(value, Mapping):
        # An environment variable is a table with its name and its value.
        name = str(value.get("name") or value.get("Name") or place)
        for key, inner in value.items():
            yield from _places_of_mask(inner, name if key in ("value", "Value") else key)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _places_of_mask(inner, place)
