"""Read the state of flows that are deployed to Argo Workflows, and forbid overlapping runs."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from metaflow.metaflow_config import KUBERNETES_NAMESPACE
from metaflow.plugins.argo.argo_client import ArgoClient
from metaflow.plugins.argo.argo_workflows_cli import sanitize_for_argo
from metaflow.plugins.kubernetes.kubernetes_client import KubernetesClient

from deployment.deployed_flow import DeployedFlow
from deployment.deployment import Deployment, deployed_name
from ppo_core.errors import StorageError, library_errors

GROUP, VERSION = "argoproj.io", "v1alpha1"

UNFINISHED = ("Pending", "Running")
"""Phases of a Workflow that has not ended."""

NEXT_MOVE = (
    "Check that kubectl reaches the cluster from here, that Argo Workflows is installed, and that "
    "you may read and change workflow templates, cron workflows and workflows of the namespace."
)


class ArgoScheduler:
    """The flows of a deployment on Argo Workflows."""

    def __init__(self, deployment: Deployment) -> None:
        """Store the deployment; the configuration of kubectl selects the cluster."""
        self._deployment = deployment
        self.namespace = deployment.namespace or KUBERNETES_NAMESPACE or "default"

    def name_of(self, flow: str) -> str:
        """Return the name of the flow's workflow template."""
        name = deployed_name(flow, self._deployment.project, self._deployment.branch)
        return str(sanitize_for_argo(name))

    def forbid_overlaps(self, flow: str) -> None:
        """Make each run of the flow wait for the run before it; skip scheduled starts during a run.

        Metaflow has no setting for this. The policy `Forbid` applies only to runs that Argo's
        schedule starts. The mutex also applies to runs that a person or an event starts.

        Raises:
            StorageError: the cluster does not answer, or refuses the change.
        """
        name = self.name_of(flow)
        with library_errors(StorageError, f"{name} could not be changed", NEXT_MOVE):
            template = self._client.get_workflow_template(name)
            template["spec"]["synchronization"] = {"mutexes": [{"name": name}]}
            self._replace("workflowtemplates", template)
            if schedule := self._client.get_cronworkflow(name):
                schedule["spec"]["concurrencyPolicy"] = "Forbid"
                self._replace("cronworkflows", schedule)

    def find(self, flow: str) -> DeployedFlow | None:
        """Return the deployed flow; None if it is not deployed.

        Raises:
            StorageError: the cluster does not answer.
        """
        name = self.name_of(flow)
        with library_errors(StorageError, "Argo Workflows cannot be read", NEXT_MOVE):
            template = self._client.get_workflow_template(name)
            if template is None:
                return None
            cron = (self._client.get_cronworkflow(name) or {}).get("spec", {})
            runs = self._runs(name)
        notes = template["metadata"]["annotations"]
        tags = json.loads(notes.get("metaflow/tags", "[]"))
        running = [run["metadata"]["name"] for run in runs if _phase_of(run) in UNFINISHED]
        return DeployedFlow(
            name=f"{self.namespace}/{name}",
            deployed_at=notes.get("metaflow/deployment_timestamp", ""),
            # A tag that a person added may have no colon.
            tags=dict(tag.split(":", 1) for tag in tags if ":" in tag),
            token=notes.get("metaflow/production_token", ""),
            cron="" if cron.get("suspend") else _times_of(cron),
            timezone=cron.get("timezone") or "",
            last_run=runs[-1]["metadata"]["name"] if runs else "",
            result=_result_of(runs[-1]) if runs else "",
            running=running[-1] if running else "",
        )

    def _runs(self, template: str) -> list[Any]:
        """Return the runs of a template, in the order of their starts."""
        found = self._objects.list_namespaced_custom_object(
            GROUP, VERSION, self.namespace, "workflows"
        )
        # No label selects the runs, because Argo labels only runs that its own CLI or UI started.
        runs = [run for run in found["items"] if _template_of(run) == template]
        return sorted(runs, key=lambda run: str(run["metadata"]["creationTimestamp"]))

    def _replace(self, plural: str, changed: dict[str, Any]) -> None:
        """Replace an object; Kubernetes refuses if the object was changed after it was read."""
        self._objects.replace_namespaced_custom_object(
            GROUP, VERSION, self.namespace, plural, changed["metadata"]["name"], changed
        )

    @cached_property
    def _client(self) -> Any:
        return ArgoClient(namespace=self.namespace)

    @cached_property
    def _objects(self) -> Any:
        return KubernetesClient().get().CustomObjectsApi()


def _times_of(cron: Mapping[str, Any]) -> str:
    """Return the start times of a cron workflow, in the form of Argo 4 or of earlier versions."""
    return "; ".join(cron.get("schedules") or []) or cron.get("schedule") or ""


def _phase_of(run: Any) -> str:
    """Return the phase of a run; a new run without a phase is `Pending`."""
    return str(run.get("status", {}).get("phase") or "Pending")


def _result_of(run: Any) -> str:
    """Return the phase of a run with its end time, or with its start time while it runs."""
    ended = run.get("status", {}).get("finishedAt")
    return f"{_phase_of(run)}, {ended or run['metadata']['creationTimestamp']}"


def _template_of(run: Any) -> str:
    """Return the name of the workflow template from which a run was created."""
    return str(run["spec"].get("workflowTemplateRef", {}).get("name", ""))
