"""Both flows compiled for both schedulers: each step has what the deployment file gives it."""

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployment.deploy_flow import DeploymentFiles, compile_flow
from deployment.deployment_file import STEPS
from ppo_core.errors import ConfigError
from tests.helpers.aws.state_machine import StateMachines
from tests.helpers.kubernetes.argo_templates import (
    as_argo_reads_it,
    jobsets,
    pods,
    validate_jobsets,
    validate_pods,
    without_nulls,
)
from tests.helpers.paths import ROOT
from tests.helpers.runs.canaries import CANARY, VARIABLES
from tests.helpers.runs.deployments import both_schedulers, write_deployment
from tests.helpers.slow_cases import slow

GIB = 2**30

CHANGES = {
    "argo": {
        "project": "my_project",
        "branch": "stage_1",
        "steps": {
            "train_policy": {"efa": 2, "mounts": {"shared": "/data"}, "environment": {"A": "b c"}},
            "register": {"retries": 0},
        },
    },
    "step-functions": {
        "steps": {
            "train_policy": {"mounts": {"fs-0123": "/data"}, "environment": {"A": "b c"}},
            "register": {"retries": 0},
        }
    },
}
"""What the examples leave at its default."""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateMachines]:
    """Both schedulers, and secrets in the environment of the commands."""
    folder = tmp_path_factory.mktemp("cluster")
    with both_schedulers(folder) as (machines, _), pytest.MonkeyPatch.context() as environment:
        for name in ("OPENAI_API_KEY", "HF_TOKEN", "DATABASE_URL", "SERVICE_PASSWORD"):
            environment.setenv(name, VARIABLES[name])
        yield machines


def written(
    folder: Path, scheduler: str, settings: dict[str, Any] | None = None
) -> DeploymentFiles:
    return write_deployment(folder, scheduler, CHANGES[scheduler], settings)


def compiled(factory: pytest.TempPathFactory, scheduler: str, flow: str, nodes: int = 1) -> Any:
    files = written(factory.mktemp(flow), scheduler, {"num_nodes": nodes})
    return without_nulls(compile_flow(files, flow))


@pytest.fixture(scope="module")
def template(machines: StateMachines, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory, "argo", "RLHF")


@pytest.fixture(scope="module")
def retrain_template(machines: StateMachines, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory, "argo", "Retrain")


@pytest.fixture(scope="module")
def template_of_machines(machines: StateMachines, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory, "argo", "RLHF", nodes=4)


@pytest.fixture(scope="module")
def states(machines: StateMachines, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory, "step-functions", "RLHF")["States"]


@pytest.fixture(scope="module")
def retrain_states(machines: StateMachines, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory, "step-functions", "Retrain")["States"]


def pod_of(template: Any, step: str) -> Any:
    (found,) = (one for one in pods(template) if one["name"] == step.replace("_", "-"))
    return found


def variables_of(container: Any) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


@pytest.mark.slow
def test_argo_and_kubernetes_know_every_key(
    template: Any, retrain_template: Any, template_of_machines: Any
):
    for one in (template, retrain_template, template_of_machines):
        assert as_argo_reads_it(one) == one
        validate_pods(one)
        validate_jobsets(one)


def test_a_run_has_a_time_limit_by_which_a_job_that_never_starts_is_noticed(
    template: Any, retrain_template: Any, tmp_path: Path
):
    for one in (template, retrain_template):
        assert one["spec"]["activeDeadlineSeconds"] == 7 * 24 * 3600
    files = write_deployment(tmp_path, "step-functions", {"timeout_hours": 30.5})
    assert compile_flow(files, "Retrain")["TimeoutSeconds"] == 109_800


def test_an_execution_gets_its_parameters_as_a_text_of_json(states: Any):
    """Start one by hand with the input {"Parameters": "{}"}, as docs/runbook.md says."""
    (start,) = (one for name, one in states.items() if name == "start")
    variables = start["Parameters"]["ContainerOverrides"]["Environment"]
    (given,) = (one for one in variables if one["Name"] == "METAFLOW_PARAMETERS")
    assert given["Value.$"] == "$.Parameters"


def test_argo_gives_a_training_its_machine(template: Any):
    pod = pod_of(template, "train_policy")
    resources = pod["container"]["resources"]
    assert resources["requests"]["cpu"] == "6"
    assert int(resources["requests"]["memory"].removesuffix("M")) * 10**6 >= 24 * GIB
    assert int(resources["requests"]["ephemeral-storage"].removesuffix("M")) * 10**6 >= 100 * GIB
    assert resources["limits"] == {"nvidia.com/gpu": "1", "vpc.amazonaws.com/efa": "2"}
    assert pod["nodeSelector"] == {
        "nvidia.com/gpu.product": "NVIDIA-L4",
        "karpenter.sh/capacity-type": "spot",
    }
    tolerated = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert pod["tolerations"] == [tolerated]
    mounts = {one["name"]: one["mountPath"] for one in pod["container"]["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    (shared_memory,) = (name for name, folder in mounts.items() if folder == "/dev/shm")
    assert volumes[shared_memory]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4096Mi"}
    (claim,) = (name for name, folder in mounts.items() if folder == "/data")
    assert volumes[claim]["persistentVolumeClaim"] == {"claimName": "shared"}
    assert pod["activeDeadlineSeconds"] == 1440 * 60
    assert pod["retryStrategy"]["limit"] == 4
    assert variables_of(pod["container"])["A"] == "b c"


def test_argo_gives_each_step_its_rights_and_secrets(template: Any, retrain_template: Any):
    accounts = {step: pod_of(template, step)["serviceAccountName"] for step in STEPS}
    assert accounts == {
        **dict.fromkeys(STEPS, "rlhf-train"),
        "evaluate_win_rate": "rlhf-judge",
        "register": "rlhf-register",
        "end": "rlhf-register",
    }
    secrets = {
        step: [one["secretRef"]["name"] for one in pod_of(template, step)["container"]["envFrom"]]
        for step in STEPS
    }
    assert secrets == {
        **{step: ["rlhf-mlflow"] for step in STEPS},
        "evaluate_win_rate": ["rlhf-mlflow", "rlhf-judge"],
        "register": ["rlhf-registry"],
        "end": ["rlhf-registry"],
    }
    for step in ("start", "end"):
        assert pod_of(retrain_template, step)["serviceAccountName"] == "rlhf-retrain"
    # By this label, the policies of infra/kubernetes tell the pods apart.
    for step in STEPS:
        labels = pod_of(template, step)["metadata"]["labels"]
        assert labels["rlhf/service-account"] == accounts[step]


def test_only_steps_with_gpus_get_one(template: Any, retrain_template: Any):
    with_gpu = {
        pod["name"]
        for one in (template, retrain_template)
        for pod in pods(one)
        if "nvidia.com/gpu" in json.dumps(pod)
    }
    assert with_gpu == {
        "load-reward-model",
        "validate-reward-model",
        "train-policy",
        "evaluate-win-rate",
    }


def test_only_the_judging_step_asks_the_judge(template: Any, states: Any):
    for step in STEPS:
        batch = states[step]["Parameters"]["ContainerOverrides"]["Environment"]
        on_batch = {one["Name"] for one in batch}
        on_argo = set(variables_of(pod_of(template, step)["container"]))
        for names in (on_batch, on_argo):
            assert ("RLHF_JUDGED_ELSEWHERE" in names) == (step != "evaluate_win_rate")


@pytest.mark.slow
def test_several_machines_get_what_their_step_gets(template_of_machines: Any):
    jobset = jobsets(template_of_machines)["train-policy"]
    for job in jobset["spec"]["replicatedJobs"]:
        made = job["template"]["spec"]["template"]
        assert made["metadata"]["labels"]["rlhf/service-account"] == "rlhf-train"
        pod = made["spec"]
        limits = pod["containers"][0]["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": "1", "vpc.amazonaws.com/efa": "2"}
        assert pod["serviceAccountName"] == "rlhf-train"
        assert pod["nodeSelector"]["nvidia.com/gpu.product"] == "NVIDIA-L4"
    join = pod_of(template_of_machines, "join_trained")
    assert join["serviceAccountName"] == "rlhf-train"
    assert "nvidia.com/gpu" not in json.dumps(join)


def test_the_schedule_belongs_to_retrain_alone(template: Any, retrain_template: Any):
    notes = retrain_template["metadata"]["annotations"]
    assert json.loads(notes["metaflow/cron"]) == {"schedule": "0 3 * * MON", "tz": "Europe/Berlin"}
    assert "metaflow/cron" not in template["metadata"]["annotations"]


@pytest.mark.slow
def test_an_event_starts_retrain_too(
    machines: StateMachines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("EVENT", "EVENT_SOURCE", "EVENT_BUS", "SERVICE_ACCOUNT", "WEBHOOK_URL"):
        monkeypatch.setenv(f"METAFLOW_ARGO_EVENTS_{name}", "ours")
    files = write_deployment(tmp_path, "argo", {"schedule": {"event": "new-preferences"}})
    notes = compile_flow(files, "Retrain")["metadata"]["annotations"]
    assert json.loads(notes["metaflow/triggers"]) == [{"name": "new-preferences", "type": "event"}]
    assert "metaflow/cron" in notes


def test_without_a_deployment_a_flow_loads_nothing_of_it():
    for flow in ("rlhf.py", "retrain.py"):
        words = ["-X", "importtime", f"flows/{flow}", "show"]
        ran = subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert re.search(r"\| +flow_parts", ran.stderr)
        assert not re.search(r"\| +deployment", ran.stderr)


def test_both_flows_share_project_and_branch(template: Any, retrain_template: Any, states: Any):
    assert template["metadata"]["name"] == "myproject.prod.stage1.rlhf"
    assert retrain_template["metadata"]["name"] == "myproject.prod.stage1.retrain"
    assert {one["metadata"]["namespace"] for one in (template, retrain_template)} == {"rlhf"}
    variables = states["start"]["Parameters"]["ContainerOverrides"]["Environment"]
    assert {"Name": "SFN_STATE_MACHINE", "Value": "rlhf.prod.RLHF"} in variables


def job_of(machines: StateMachines, state: Any) -> Any:
    """The definition of the job of a state."""
    name = state["Parameters"]["JobDefinition"]
    found = machines.client("batch").describe_job_definitions(jobDefinitions=[name])
    return found["jobDefinitions"][0]["containerProperties"]


def test_batch_gives_each_step_its_machine_and_role(
    machines: StateMachines, states: Any, retrain_states: Any
):
    training = states["train_policy"]["Parameters"]
    resources = training["ContainerOverrides"]["ResourceRequirements"]
    assert {one["Type"]: one["Value"] for one in resources} == {
        "VCPU": "6",
        "MEMORY": str(24 * 1024),
        "GPU": "1",
    }
    assert training["JobQueue"].endswith("rlhf-l4-spot")
    assert training["Timeout"] == {"AttemptDurationSeconds": 1440 * 60}
    assert training["RetryStrategy"]["Attempts"] == 5
    job = job_of(machines, states["train_policy"])
    assert job["mountPoints"] == [{"sourceVolume": "efs_fs-0123", "containerPath": "/data"}]
    roles = {step: job_of(machines, states[step])["jobRoleArn"].split("/")[1] for step in STEPS}
    assert roles == {
        **dict.fromkeys(STEPS, "rlhf-train"),
        "evaluate_win_rate": "rlhf-judge",
        "register": "rlhf-register",
        "end": "rlhf-register",
    }
    for step in ("start", "end"):
        assert job_of(machines, retrain_states[step])["jobRoleArn"].endswith("/rlhf-retrain")
    without_gpu = states["register"]["Parameters"]["ContainerOverrides"]["ResourceRequirements"]
    assert "GPU" not in {one["Type"] for one in without_gpu}
    assert states["register"]["Parameters"]["RetryStrategy"]["Attempts"] == 1


def test_a_secret_of_the_environment_is_nowhere(
    machines: StateMachines, template: Any, retrain_template: Any, states: Any, retrain_states: Any
):
    for one in (template, retrain_template, states, retrain_states):
        assert CANARY not in json.dumps(one)
    store = machines.client("s3")
    pages = store.get_paginator("list_objects_v2").paginate(Bucket="artifacts")
    keys = [one["Key"] for page in pages for one in page["Contents"]]
    assert len(keys) >= 4
    for key in keys:
        content = store.get_object(Bucket="artifacts", Key=key)["Body"].read()
        assert CANARY.encode() not in unpacked(content), key


@pytest.mark.parametrize("scheduler", ["step-functions", *slow("argo")])
def test_a_secret_that_metaflow_would_write_is_refused(
    machines: StateMachines, scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("METAFLOW_SERVICE_AUTH_KEY", f"{CANARY}0service0key")
    with pytest.raises(ConfigError, match=r"clear text in METAFLOW_SERVICE_HEADERS\.") as refused:
        compile_flow(written(tmp_path, scheduler), "Retrain")
    assert CANARY not in str(refused.value)


def test_a_password_in_an_address_that_metaflow_would_write_is_refused(
    machines: StateMachines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    address = f"https://meta:{CANARY}@metadata.example"
    monkeypatch.setenv("METAFLOW_SERVICE_INTERNAL_URL", address)
    with pytest.raises(ConfigError, match=r"text in METAFLOW_SERVICE_URL\.") as refused:
        compile_flow(written(tmp_path, "step-functions"), "Retrain")
    assert CANARY not in str(refused.value)


def test_an_address_with_a_query_stays_whole(machines: StateMachines, tmp_path: Path):
    mirror = "https://mirror.example/simple?arch=x86"
    changes = {"retrain": {"environment": {"PIP_INDEX_URL": mirror}}}
    files = write_deployment(tmp_path, "step-functions", changes)
    definition = compile_flow(files, "Retrain")["States"]["start"]["Parameters"]
    variables = definition["ContainerOverrides"]["Environment"]
    assert {"Name": "PIP_INDEX_URL", "Value": mirror} in variables


def unpacked(content: bytes) -> bytes:
    """A code package without its compression, or the content itself."""
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
