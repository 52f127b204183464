"""Start the flow RLHF on the scheduler of Retrain; without a scheduler, on this machine."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from metaflow.exception import MetaflowException

from ppo_core.errors import ProcessError, reason_of

STATE_MACHINE = "SFN_STATE_MACHINE"
"""Environment variable that names the state machine in a job of Step Functions."""

TEMPLATE = "ARGO_WORKFLOW_TEMPLATE"
"""Environment variable that names the workflow template in a pod of Argo Workflows."""


def start_training(from_file: Mapping[str, Any], lease: str) -> str:
    """Start the flow RLHF with a lease; return a text that names the started run.

    On a scheduler, start the deployed flow RLHF of the same project and branch, and do not wait for
    its end. Otherwise, run the flow on this machine to its end.

    Args:
        from_file: tables of the settings file, for a run on this machine. A deployed flow uses the
            settings that it was deployed with.
        lease: owner of the lease that the run will renew and release.

    Raises:
        ProcessError: the flow could not be started, or ended with an error.
    """
    parameters = {"lease": lease}
    try:
        if own := os.environ.get(STATE_MACHINE):
            # Imported here, because a run on this machine may have no scheduler client installed.
            from metaflow.plugins.aws.step_functions.step_functions import StepFunctions

            started = StepFunctions.trigger(training_name(own), parameters)
            return f"RLHF/sfn-{started['executionArn'].rpartition(':')[2]}"
        if own := os.environ.get(TEMPLATE):
            from metaflow.plugins.argo.argo_workflows import ArgoWorkflows

            started = ArgoWorkflows.trigger(training_name(own), parameters)
            return f"RLHF/argo-{started['metadata']['name']}"
    except MetaflowException as error:
        raise ProcessError(
            f"The flow RLHF could not be started: {reason_of(error)}. If it is not deployed, "
            "deploy it beside the flow Retrain, in the same project and branch. Otherwise remove "
            "the cause that the error names. Then start the flow Retrain again."
        ) from error
    return _run_here(from_file, lease)


def training_name(own: str) -> str:
    """Return the name of the deployed flow RLHF, derived from the name of the flow Retrain.

    Raises:
        ProcessError: `own` does not end with "Retrain" or "retrain".
    """
    for mine, other in (("Retrain", "RLHF"), ("retrain", "rlhf")):
        if own.endswith(mine):
            return own.removesuffix(mine) + other
    raise ProcessError(
        f"The name of the flow RLHF cannot be derived from {own!r}, the deployed name of Retrain: "
        "Metaflow shortened this name, or --name set it. Choose a shorter project or branch in the "
        "deployment file, and deploy both flows again."
    )


def _run_here(from_file: Mapping[str, Any], lease: str) -> str:
    flow = Path(__file__).parents[1] / "rlhf.py"
    words = ["--config-value", "settings", tomli_w.dumps(from_file), "run", "--lease", lease]
    ended = subprocess.run([sys.executable, str(flow), *words], check=False)
    if ended.returncode:
        raise ProcessError(
            f"The flow RLHF ended with exit code {ended.returncode}; its messages are above. "
            "Correct what they name, and start the flow Retrain again."
        )
    return "the flow RLHF on this machine, which has ended"
