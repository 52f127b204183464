"""Add Metaflow decorators to the flows, with the values of a deployment file."""

from math import ceil
from typing import Any

from metaflow import (
    batch,
    environment,
    kubernetes,
    project,
    retry,
    schedule,
    secrets,
    timeout,
    trigger,
)

from deployment.deployment import JUDGING_STEP, TRAINING_STEP, Deployment
from deployment.step_settings import TAINT, StepResources
from pipeline.judges.judge_names import JUDGED_ELSEWHERE, SCORED_ELSEWHERE

GPU_LABEL = "nvidia.com/gpu.product"
"""Node label in which NVIDIA's feature discovery stores the type of the node's GPUs."""

ACCOUNT_LABEL = "rlhf/service-account"
"""Pod label with the name of the pod's service account. The NetworkPolicies of infra/kubernetes
select pods by this label, because a NetworkPolicy cannot select pods by service account."""

EFA_RESOURCE = "vpc.amazonaws.com/efa"
"""Name of the Kubernetes resource for EFA network devices."""


def add_decorators(flow: Any, deployment: Deployment, *, is_scheduled: bool) -> None:
    """Add the project, the schedule, and the decorators of all steps to a flow.

    Args:
        flow: the flow, in the form that Metaflow passes to its mutators.
        deployment: the deployment.
        is_scheduled: whether this is the flow Retrain; the flow RLHF has no schedule.
    """
    branch = {"branch": deployment.branch} if deployment.branch else {}
    # Without `production`, the name of the deployed flow would contain the name of the user.
    names = {"name": deployment.project, "production": True, **branch}
    flow.add_decorator(project, deco_kwargs=names)
    if is_scheduled:
        _add_start(flow, deployment)
    for name, step in flow.steps:
        resources = deployment.retrain if is_scheduled else deployment.resources_of(name)
        _add_to_step(step, resources, deployment)


def _add_start(flow: Any, deployment: Deployment) -> None:
    when = deployment.schedule
    if when.cron:
        times = {"cron": when.cron, "timezone": when.timezone or None}
        flow.add_decorator(schedule, deco_kwargs=times)
    if when.event:
        flow.add_decorator(trigger, deco_kwargs={"event": when.event})


def _add_to_step(step: Any, resources: StepResources, deployment: Deployment) -> None:
    image = {"image": deployment.image_of(resources)}
    if deployment.scheduler == "argo":
        attributes = _kubernetes_attributes(resources)
        step.add_decorator(kubernetes, deco_kwargs={**attributes, **image})
    else:
        attributes = _batch_attributes(resources)
        step.add_decorator(batch, deco_kwargs={**attributes, **image})
        if resources.secrets:
            sources = [{"type": "aws-secrets-manager", "id": name} for name in resources.secrets]
            step.add_decorator(secrets, deco_kwargs={"sources": sources})
    if variables := {**resources.environment, **_variables_of_keys(resources, deployment)}:
        step.add_decorator(environment, deco_kwargs={"vars": variables})
    if resources.timeout_minutes:
        step.add_decorator(timeout, deco_kwargs={"minutes": resources.timeout_minutes})
    if resources.retries is not None:
        times = {"times": resources.retries, "minutes_between_retries": 0}
        step.add_decorator(retry, deco_kwargs=times, duplicates=step.OVERRIDE)


def _variables_of_keys(resources: StepResources, deployment: Deployment) -> dict[str, str]:
    """Return the environment variables that tell a step that it has no key for a server.

    Each server is called by one step: the judging step or the training step. If that step has a
    secret that `resources` does not have, then this step has no key for the server.
    """
    steps = {JUDGED_ELSEWHERE: JUDGING_STEP, SCORED_ELSEWHERE: TRAINING_STEP}
    return {
        variable: "1"
        for variable, name in steps.items()
        if {*deployment.resources_of(name).secrets} - {*resources.secrets}
    }


def _kubernetes_attributes(resources: StepResources) -> dict[str, Any]:
    """Return the attributes of @kubernetes that are set; the others keep Metaflow's defaults."""
    gpu_node = {GPU_LABEL: resources.gpu_type} if resources.gpu_type else {}
    efa = {EFA_RESOURCE: str(resources.efa)} if resources.efa else {}
    account = {ACCOUNT_LABEL: resources.service_account} if resources.service_account else {}
    given = {
        "disk": _megabytes(resources.disk_gib),
        "extended_resources": efa,
        "gpu": resources.gpu,
        "labels": account,
        "node_selector": {**gpu_node, **resources.node_selector},
        "persistent_volume_claims": resources.mounts,
        "secrets": resources.secrets,
        "service_account": resources.service_account,
        "shared_memory": _mebibytes(resources.shared_memory_gib),
        "tolerations": [_toleration(taint) for taint in resources.tolerations],
    }
    sizes = {"cpu": f"{resources.cpu:g}", "memory": _megabytes(resources.memory_gib)}
    return {**sizes, **{name: value for name, value in given.items() if value}}


def _batch_attributes(resources: StepResources) -> dict[str, Any]:
    """Return the attributes of @batch that are set; the others keep Metaflow's defaults."""
    given = {
        "efs_volumes": [f"{volume}:{folder}" for volume, folder in resources.mounts.items()],
        "gpu": resources.gpu,
        "iam_role": resources.role,
        "queue": resources.queue,
        "shared_memory": _mebibytes(resources.shared_memory_gib),
    }
    sizes = {"cpu": f"{resources.cpu:g}", "memory": _mebibytes(resources.memory_gib)}
    return {**sizes, **{name: value for name, value in given.items() if value}}


def _toleration(taint: str) -> dict[str, str]:
    """Convert a taint, whose syntax `StepResources` has checked, to a toleration."""
    match = TAINT.fullmatch(taint)
    assert match
    value = {"operator": "Exists"} if match["value"] is None else {"value": match["value"]}
    return {"key": match["key"], "effect": match["effect"], **value}


def _mebibytes(gib: float) -> int:
    return ceil(gib * 1024)


def _megabytes(gib: float) -> int:
    """Convert GiB to units of 10^6 bytes, which Metaflow uses for Kubernetes."""
    return ceil(gib * 2**30 / 10**6)
