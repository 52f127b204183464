"""Deployment files of tests, and the local servers that they are deployed to."""

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from deployment.deploy_flow import DeploymentFiles, read_deployment_file
from pipeline.settings.overrides import merge_tables
from tests.helpers.aws.state_machine import StateMachines, state_machines
from tests.helpers.kubernetes.kubernetes_api import Cluster, kubernetes_api
from tests.helpers.paths import ROOT

EXAMPLES = ROOT / "infra" / "deployments"

SCHEDULERS = ("argo", "step-functions")


def example(scheduler: str) -> dict[str, Any]:
    """The tables of the example for a scheduler."""
    return tomllib.loads((EXAMPLES / f"{scheduler}.toml").read_text())


def write_deployment(
    folder: Path,
    scheduler: str,
    changes: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> DeploymentFiles:
    """Write the example for a scheduler and its settings, with changes, into a folder."""
    path = folder / f"{scheduler}.toml"
    path.write_text(tomli_w.dumps(merge_tables(example(scheduler), changes or {})))
    name = example(scheduler)["settings"]
    tables = tomllib.loads((EXAMPLES / name).read_text())
    (folder / name).write_text(tomli_w.dumps(merge_tables(tables, settings or {})))
    return read_deployment_file(path)


@contextmanager
def both_schedulers(folder: Path) -> Iterator[tuple[StateMachines, Cluster]]:
    """Run moto with the queues of the example, and the API of Kubernetes, for this environment."""
    with (
        state_machines() as machines,
        kubernetes_api(folder) as cluster,
        pytest.MonkeyPatch.context() as environment,
    ):
        batch = machines.client("batch")
        made = batch.describe_compute_environments()["computeEnvironments"][0]
        order = [{"order": 1, "computeEnvironment": made["computeEnvironmentArn"]}]
        for queue in ("rlhf-cpu", "rlhf-l4", "rlhf-l4-spot"):
            batch.create_job_queue(
                jobQueueName=queue, state="ENABLED", priority=1, computeEnvironmentOrder=order
            )
        variables = {"PYTHONPATH": str(ROOT), "KUBECONFIG": str(cluster.kubeconfig)}
        for name, value in {**machines.variables, **variables}.items():
            environment.setenv(name, value)
        yield machines, cluster
