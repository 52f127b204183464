"""Workflow templates as Argo and Kubernetes read them: schemas, placeholders, pods and JobSets."""

import base64
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate
import yaml
from hera.workflows.models import WorkflowTemplate
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

KUBERNETES = "1.37"
"""Version whose schemas the pods and jobs are compared with."""


def without_nulls(value: Any) -> Any:
    """The value as Kubernetes keeps it: a null is a key that is not there."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def filled(text: str, parameters: Mapping[str, str]) -> str:
    """The text with its placeholders filled in, as by Argo."""
    # A task's id is made of it, and a task that is there keeps its parameters.
    created = str(time.time_ns())

    def value(match: re.Match[str]) -> str:
        inner = match.group(1)
        if name := re.fullmatch(r"=toBase64\(workflow\.parameters\['(.+)'\]\)", inner):
            return encoded(parameters[name[1]])
        if inner == "=asInt(inputs.parameters.workerCount)":
            return "3"
        known = {"workflow.name": "rlhf-1", "workflow.creationTimestamp": created}
        return known.get(inner, "7")

    return re.sub(r"\{\{(.+?)\}\}", value, text)


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def jobsets(template: Any) -> dict[str, Any]:
    """The JobSet of each step that has one."""
    return {
        each["name"]: without_nulls(yaml.safe_load(filled(each["resource"]["manifest"], {})))
        for each in template["spec"]["templates"]
        if "resource" in each
    }


def as_argo_reads_it(template: Any) -> Any:
    """The template without the keys that Argo does not know."""
    known = WorkflowTemplate.model_validate(template)
    dumped = known.model_dump_json(by_alias=True, exclude_none=True, exclude_unset=True)
    return json.loads(dumped)


def pods(template: Any) -> Iterator[Any]:
    """The template of each pod that Argo itself starts."""
    return (each for each in template["spec"]["templates"] if "container" in each)


def validate_pods(template: Any) -> None:
    """Raise unless Kubernetes accepts every pod of a workflow template."""
    for each in pods(template):
        keys = ("volumes", "nodeSelector", "tolerations", "serviceAccountName")
        # Argo names the container.
        spec = {"containers": [{"name": "main", **each["container"]}], "restartPolicy": "Never"}
        spec |= {key: each[key] for key in keys if key in each}
        metadata = {"name": each["name"], **each.get("metadata", {})}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def validate_jobsets(template: Any) -> None:
    """Raise unless Kubernetes accepts every JobSet of a workflow template, and its jobs."""
    for name, jobset in jobsets(template).items():
        known = JobsetV1alpha2JobSet.from_dict(jobset)
        assert known is not None
        assert without_nulls(known.to_dict()) == jobset
        for job in jobset["spec"]["replicatedJobs"]:
            whole = {"apiVersion": "batch/v1", "kind": "Job", **job["template"]}
            whole["metadata"] = {"name": name, **whole["metadata"]}
            kubernetes_validate.validate(whole, KUBERNETES, strict=True)
