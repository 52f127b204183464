"""Pods that Metaflow makes for Argo, under infra/kubernetes: connections, requests, security."""

import json
import re
from typing import Any

import pytest
import yaml

from tests.helpers.kubernetes.kubernetes_files import objects
from tests.helpers.kubernetes.network_policies import Outside, Peer, Pod, can_connect
from tests.helpers.runs.scheduled_flow import deployment_variables, flow_command
from tests.helpers.servers.servers import s3

LABEL = "rlhf/service-account"
"""Label of a pod with the name of its service account."""

JOBSET = "jobset.sigs.k8s.io/jobset-name"
"""Label that the controller of JobSets gives the pods of a JobSet, with its name."""

DUTIES = ["rlhf-retrain", "rlhf-train", "rlhf-judge", "rlhf-register"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The flow compiled for 4 machines, each step as `rlhf-train`."""
    with s3() as store:
        variables = deployment_variables(store, tmp_path_factory.mktemp("home")) | {
            "METAFLOW_KUBERNETES_NAMESPACE": "rlhf",
            "METAFLOW_KUBERNETES_SERVICE_ACCOUNT": "rlhf-train",
            "METAFLOW_KUBERNETES_LABELS": f"{LABEL}=rlhf-train",
        }
        create = ("argo-workflows", "create", "--only-json")
        folder = tmp_path_factory.mktemp("compiled")
        ended = flow_command(folder, *create, nodes=4, variables=variables)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


def manifest(template: Any) -> Any:
    """The JobSet of the training, with other values for Argo's placeholders."""
    (step,) = (each for each in template["spec"]["templates"] if each["name"] == "train-policy")
    return yaml.safe_load(re.sub(r"\{\{.+?\}\}", "1", step["resource"]["manifest"]))


def labels_of_step(template: Any, step: str) -> dict[str, str]:
    """The labels of the pod that Argo starts for a step."""
    (found,) = (each for each in template["spec"]["templates"] if each["name"] == step)
    own = found.get("metadata") or {}
    return {**template["spec"]["podMetadata"]["labels"], **(own.get("labels") or {})}


@pytest.fixture(scope="module")
def pods(template: Any) -> dict[str, Pod]:
    """A pod of each account, and other pods of the flow."""
    step = labels_of_step(template, "start")
    assert step[LABEL] == "rlhf-train"
    job = manifest(template)["spec"]["replicatedJobs"][0]
    machine = job["template"]["spec"]["template"]["metadata"]["labels"]
    return {
        **{name: Pod("rlhf", {**step, LABEL: name}) for name in DUTIES},
        "rlhf-consumer": Pod("rlhf", {LABEL: "rlhf-consumer"}),
        "machine": Pod("rlhf", {**machine, JOBSET: "train-1"}),
        "creator of a JobSet": Pod("rlhf", labels_of_step(template, "train-policy")),
        "error hook": Pod("rlhf", labels_of_step(template, "error-msg-capture-hook")),
        "any": Pod("rlhf"),
    }


TARGETS: dict[str, tuple[Peer, int, str]] = {
    "dns": (Pod("kube-system", {"k8s-app": "kube-dns"}), 53, "UDP"),
    "s3": (Outside("192.0.2.10"), 443, "TCP"),
    "kubernetes": (Outside("198.51.100.10"), 6443, "TCP"),
    "mlflow": (Pod("mlflow", {"app.kubernetes.io/name": "mlflow"}), 5000, "TCP"),
    "metadata": (Pod("metaflow", {"app.kubernetes.io/name": "metaflow-service"}), 8080, "TCP"),
    "judge": (Outside("162.159.140.245"), 443, "TCP"),
    "roles of EKS": (Outside("169.254.170.23"), 80, "TCP"),
    # What no pod reaches.
    "internet": (Outside("162.159.140.245"), 80, "TCP"),
    "node": (Outside("169.254.169.254"), 80, "TCP"),
    "node, TLS": (Outside("169.254.169.254"), 443, "TCP"),
    "company": (Outside("10.1.2.3"), 443, "TCP"),
    "mlflow's database": (Pod("mlflow", {"app.kubernetes.io/name": "postgresql"}), 5432, "TCP"),
    "mlflow's ssh": (Pod("mlflow", {"app.kubernetes.io/name": "mlflow"}), 22, "TCP"),
    "others": (Pod("others", {"app.kubernetes.io/name": "mlflow"}), 5000, "TCP"),
    "others' dns": (Pod("others", {"k8s-app": "kube-dns"}), 53, "UDP"),
}

STEP = {"dns", "s3", "kubernetes", "mlflow", "metadata", "roles of EKS"}

REACHED = {
    "rlhf-retrain": STEP,
    "rlhf-train": STEP,
    "rlhf-judge": STEP | {"judge"},
    "rlhf-register": STEP,
    "rlhf-consumer": {"dns", "s3", "mlflow", "roles of EKS"},
    "machine": STEP - {"kubernetes"},
    "creator of a JobSet": STEP - {"mlflow", "roles of EKS"},
    "error hook": STEP - {"mlflow", "roles of EKS"},
    "any": {"dns", "s3"},
}
"""All targets that a pod reaches."""


@pytest.mark.parametrize("name", REACHED)
def test_a_pod_reaches_what_its_duty_needs_and_nothing_else(name: str, pods: dict[str, Pod]):
    policies = objects("NetworkPolicy")
    reached = {
        target
        for target, (peer, port, protocol) in TARGETS.items()
        if can_connect(policies, pods[name], peer, port, protocol)
    }
    assert reached == REACHED[name]


@pytest.mark.parametrize("port", [22, 29500, 45001])
def test_only_machines_of_trainings_reach_each_other(port: int, pods: dict[str, Pod]):
    policies = objects("NetworkPolicy")
    connected = {
        (source, target)
        for source in pods
        for target in pods
        if can_connect(policies, pods[source], pods[target], port)
    }
    assert connected == {("machine", "machine")}


@pytest.mark.parametrize("source", [Pod("others"), Outside("10.1.2.3"), Outside("8.8.8.8")])
def test_nobody_reaches_a_pod_from_elsewhere(source: Peer, pods: dict[str, Pod]):
    policies = objects("NetworkPolicy")
    assert not [name for name, pod in pods.items() if can_connect(policies, source, pod, 443)]


def specifications(template: Any) -> list[Any]:
    """The specifications of the pods of all steps, one of them a machine's."""
    keys = ("volumes", "securityContext", "hostNetwork", "hostPID", "hostIPC")
    steps = [each for each in template["spec"]["templates"] if "container" in each]
    found = [
        {"containers": [each["container"]], **{key: each.get(key) for key in keys}}
        for each in steps
    ]
    job = manifest(template)["spec"]["replicatedJobs"][1]
    return [*found, job["template"]["spec"]["template"]["spec"]]


def test_pods_fulfil_the_standard_that_the_namespace_enforces(template: Any):
    (namespace,) = objects("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "baseline"
    found = specifications(template)
    assert len(found) == 11
    for spec in found:
        assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
        assert all("hostPath" not in volume for volume in spec.get("volumes") or [])
        for container in spec["containers"]:
            assert not container.get("securityContext")
            assert all("hostPort" not in port for port in container.get("ports") or [])


def in_units(quantity: str) -> float:
    """A quantity of Kubernetes as a number of cores or bytes."""
    factors = {"m": 1e-3, "Mi": 2**20, "M": 1e6, "": 1.0}
    number, unit = re.fullmatch(r"([\d.]+)(\D*)", quantity).groups()
    return float(number) * factors[unit]


def test_each_container_has_the_requests_that_the_quota_counts(template: Any):
    (quota,), (limits,) = objects("ResourceQuota"), objects("LimitRange")
    (default,) = limits["spec"]["limits"]
    counted = {
        name.removeprefix("requests.")
        for name in quota["spec"]["hard"]
        if name.startswith("requests.") and "gpu" not in name
    }
    of_argo = {"name": "wait"}
    for container in [of_argo, *(each["containers"][0] for each in specifications(template))]:
        resources = container.get("resources") or {}
        requests = {**default["defaultRequest"], **(resources.get("requests") or {})}
        maximum = {**default.get("default", {}), **(resources.get("limits") or {})}
        assert counted <= set(requests), container["name"]
        for name in set(requests) & set(maximum):
            assert in_units(requests[name]) <= in_units(maximum[name]), (container["name"], name)
