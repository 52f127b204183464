"""Run the Metaflow commands that deploy, start and delete the flows of a deployment."""

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
from metaflow_glue.execution_parameters import ARGO, COMMANDS, STEP_FUNCTIONS
from metaflow_glue.metaflow_secrets import UNREDACTED
from ppo_core.errors import ConfigError, ProcessError
from ppo_core.errors.redaction import describe_secret, mask_secrets
from ppo_core.io.text_files import read_toml_file

FILES = {"RLHF": "rlhf.py", "Retrain": "retrain.py"}
"""Flow -> its file, in the order of deployment. RLHF is first, because Retrain starts RLHF."""

SCHEDULES = "METAFLOW_ARGO_WORKFLOWS_USE_SCHEDULES"
"""Environment variable that makes Metaflow write cron times in the only form that Argo 4 reads."""

ANOTHERS = "Try again with the correct production token."
"""Metaflow's message when it refuses to change another user's deployment."""

MAX_LINES = 12
"""The message about a failed command shows at most this number of lines, the last of stderr."""


@dataclass(frozen=True)
class DeploymentFiles:
    """A deployment, with the paths of its deployment file and its settings file."""

    path: Path
    deployment: Deployment
    authorize: str = ""
    """Metaflow's production token, for changing somebody else's deployment; may be empty."""

    @property
    def settings(self) -> Path:
        """Path of the settings file."""
        return self.path.parent / self.deployment.settings


def read_deployment_file(path: Path, authorize: str = "") -> DeploymentFiles:
    """Return the deployment that a file describes, with its path and the token.

    Raises:
        ConfigError: the file cannot be read, is empty, is not TOML, or is invalid (see
            `read_deployment`).
    """
    tables = read_toml_file(path, ConfigError)
    if not tables:
        raise ConfigError(f"'{path}' is empty. infra/deployments has an example of each scheduler.")
    return DeploymentFiles(path, read_deployment(tables), authorize)


def create_flow(files: DeploymentFiles, flow: str, *words: str) -> str:
    """Deploy a flow, or only compile it, and return Metaflow's output, which may have secrets.

    Args:
        files: the deployment and its files.
        flow: name of the flow.
        words: further arguments of Metaflow's `create`; `--only-json` only compiles the flow.

    Raises:
        ProcessError: Metaflow refuses the flow.
    """
    limit = round(3600 * files.deployment.timeout_hours)
    limits = ["--workflow-timeout", str(limit)] if limit else []
    return run_flow_command(files, flow, "create", *limits, *_authorization(files), *words)


def delete_flow(files: DeploymentFiles, flow: str) -> None:
    """Delete a flow from the scheduler.

    Raises:
        ProcessError: the scheduler refuses the deletion.
    """
    run_flow_command(files, flow, "delete", *_authorization(files))


def start_flow(files: DeploymentFiles, flow: str, *words: str) -> None:
    """Start a deployed flow; `words` are its parameters, as flags of the command line.

    Raises:
        ProcessError: the scheduler refuses the start.
    """
    run_flow_command(files, flow, "trigger", *words)


def compile_flow(files: DeploymentFiles, flow: str) -> dict[str, Any]:
    """Compile a flow without deploying it; return the definition that the scheduler would store.

    While Metaflow compiles the flow, it uploads the code package and, for Step Functions, registers
    job definitions at AWS Batch.

    Raises:
        ConfigError: the definition contains a secret in clear text.
        ProcessError: Metaflow refuses the flow, or its first job would execute parameters as code.
    """
    text = create_flow(files, flow, "--only-json")
    compiled: dict[str, Any] = json.loads(text)
    if ARGO.search(text) or STEP_FUNCTIONS.search(text):
        raise ProcessError(
            f"Metaflow compiled the flow {flow} so that the shell of its first job would execute "
            "the parameters of an execution. Install the version of Metaflow that pyproject.toml "
            "names."
        )
    if places := sorted(set(_places_of_secrets(compiled, flow))):
        raise ConfigError(
            f"The scheduler would store a secret in clear text in {', '.join(places)}. Unset the "
            "environment variable that holds it. On Argo, list in "
            "METAFLOW_ARGO_WORKFLOWS_ENV_VARS_TO_SKIP the variables that a Kubernetes Secret "
            "provides to the steps."
        )
    return compiled


def run_flow_command(files: DeploymentFiles, flow: str, *words: str) -> str:
    """Run one of Metaflow's scheduler commands for a flow, and return its standard output.

    The output is not redacted, so do not show it.

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
            f"`python flows/{' '.join(command)}` failed. Correct the error that it names:\n"
            + "\n".join(messages)
        )
    return ran.stdout


def _authorization(files: DeploymentFiles) -> list[str]:
    return ["--authorize", files.authorize] if files.authorize else []


def _variables(deployment: Deployment) -> dict[str, str]:
    """Return the environment variables that a command needs for this deployment."""
    chosen = {SCHEDULES: os.environ.get(SCHEDULES, "True"), UNREDACTED: "1"}
    if deployment.namespace:
        chosen["METAFLOW_KUBERNETES_NAMESPACE"] = deployment.namespace
    return chosen


def _places_of_secrets(value: Any, place: str) -> Iterator[str]:
    """Yield the name of each text in `value` that has a secret; `place` names `value`."""
    if isinstance(value, str):
        if describe_secret(value):
            yield place
    elif isinstance(value, Mapping):
        # An environment variable is a table with the keys name and value.
        name = str(value.get("name") or value.get("Name") or place)
        for key, inner in value.items():
            yield from _places_of_secrets(inner, name if key in ("value", "Value") else key)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _places_of_secrets(inner, place)
