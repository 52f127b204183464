"""The next time of a schedule, as Argo and EventBridge compute it."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from unittest.mock import MagicMock

import pytest
from metaflow.plugins.argo.argo_client import ArgoClient

from deployment import step_functions_scheduler
from deployment.argo_scheduler import ArgoScheduler
from deployment.deployed_flow import CHANGES, COMMIT, DEPLOYED, DEPLOYMENT, SETTINGS
from deployment.deployment_file import read_deployment
from deployment.overview import next_run, render_deployment, render_status
from deployment.step_functions_scheduler import StepFunctionsScheduler
from pipeline.settings.overrides import merge_tables
from ppo_core.errors import ConfigError
from tests.helpers.kubernetes.kubernetes_api import Cluster, kubernetes_api
from tests.helpers.runs.deployments import example


@pytest.mark.parametrize(
    ("cron", "timezone", "after", "expected"),
    [
        # 2026-10-19 is a Monday; Berlin leaves summer time on Sunday, 2026-10-25.
        ("0 3 * * MON", "", "2026-10-19T02:59", "2026-10-19T03:00+00:00"),
        ("0 3 * * MON", "Europe/Berlin", "2026-10-19T02:59", "2026-10-26T03:00+01:00"),
        ("0 3 * * MON", "Europe/Berlin", "2026-10-19T00:59", "2026-10-19T03:00+02:00"),
        ("0 3 ? * MON *", "", "2026-10-19T03:00", "2026-10-26T03:00+00:00"),
        ("30 1 1 * ? *", "", "2026-10-19T00:00", "2026-11-01T01:30+00:00"),
        ("0 3 ? * MON#1 *", "", "2026-10-19T00:00", "2026-11-02T03:00+00:00"),
        ("0 */6 * * *", "", "2026-10-19T06:00", "2026-10-19T12:00+00:00"),
    ],
)
def test_the_next_time(cron: str, timezone: str, after: str, expected: str):
    start = datetime.fromisoformat(after).replace(tzinfo=UTC)
    assert next_run(cron, timezone, start) == datetime.fromisoformat(expected)


@pytest.mark.parametrize("cron", ["0 3 ? * FRIL *", "0 3 ? * L *", "0 3 LW * ? *"])
def test_times_that_only_eventbridge_reads_are_unknown(cron: str, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    deployment = read_deployment(
        merge_tables(example("step-functions"), {"schedule": {"cron": cron}})
    )
    tags = dict.fromkeys((SETTINGS, COMMIT, CHANGES), "")
    text = render_deployment(deployment, tags, 1)
    assert f"starts: {cron} (UTC), next start unknown" in text
    assert "\x1b" not in text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The API of Kubernetes, whose client reads the place of the kubeconfig once in a process."""
    with (
        kubernetes_api(tmp_path_factory.mktemp("cluster")) as cluster,
        pytest.MonkeyPatch.context() as patches,
    ):
        place = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
        patches.setattr(place, str(cluster.kubeconfig))
        yield cluster


def test_the_state_on_argo_has_a_schedule_of_either_form(cluster: Cluster):
    name = "rlhf.prod.retrain"
    path = "/apis/argoproj.io/v1alpha1/namespaces/rlhf/{}/" + name
    deployment = read_deployment(example("argo"))
    notes = {"metaflow/tags": json.dumps(["by-hand", f"{SETTINGS}:77"])}
    template = {"metadata": {"name": name, "annotations": notes}}
    cluster.objects[path.format("workflowtemplates")] = template
    for spec in ({"schedule": "0 3 * * MON"}, {"schedules": ["0 3 * * MON"]}):
        cluster.objects[path.format("cronworkflows")] = {"spec": spec}
        found = ArgoScheduler(deployment).find("Retrain")
        assert found is not None
        assert (found.cron, found.tags) == ("0 3 * * MON", {SETTINGS: "77"})
    two = {"schedules": ["0 0 29 FEB *", "30 3 1 1 *"]}
    cluster.objects[path.format("cronworkflows")] = {"spec": two}
    found = ArgoScheduler(deployment).find("Retrain")
    assert found is not None
    assert found.cron == "0 0 29 FEB *; 30 3 1 1 *"
    tags = dict.fromkeys((SETTINGS, DEPLOYMENT), "")
    starts = [next_run(cron, "") for cron in two["schedules"]]
    assert f"{min(starts):%Y-%m-%d %H:%M} UTC" in render_status({"Retrain": found}, tags)


def test_a_schedule_that_create_has_removed_starts_nothing_on_argo(cluster: Cluster):
    name = "rlhf.prod.retrain"
    path = "/apis/argoproj.io/v1alpha1/namespaces/rlhf/{}/" + name
    template = {"metadata": {"annotations": {}}}
    cluster.objects[path.format("workflowtemplates")] = template
    cluster.objects.pop(path.format("cronworkflows"), None)
    # What Metaflow's `create` does with a schedule, and then without one.
    for cron in ("0 3 * * MON", None):
        ArgoClient(namespace="rlhf").schedule_workflow_template(name, cron)
        found = ArgoScheduler(read_deployment(example("argo"))).find("Retrain")
        assert found is not None and found.cron == (cron or "")
    assert cluster.objects[path.format("cronworkflows")]["spec"]["suspend"] is True


def test_a_run_that_has_not_ended_is_found_behind_a_later_one_on_argo(cluster: Cluster):
    path = "/apis/argoproj.io/v1alpha1/namespaces/rlhf/{}/{}"

    def run(name: str, day: int, status: dict[str, str], template: str) -> None:
        metadata = {"name": name, "creationTimestamp": f"2026-11-0{day}T03:00:00Z"}
        spec = {"workflowTemplateRef": {"name": template}}
        written = {"metadata": metadata, "spec": spec, "status": status}
        cluster.objects[path.format("workflows", name)] = written

    template = {"metadata": {"annotations": {}}}
    cluster.objects[path.format("workflowtemplates", "rlhf.prod.rlhf")] = template
    scheduler = ArgoScheduler(read_deployment(example("argo")))
    ended = {"phase": "Failed", "finishedAt": "2026-11-03T04:00:00Z"}
    run("b", 3, ended, "rlhf.prod.rlhf")
    run("c", 4, {"phase": "Running"}, "rlhf.prod.retrain")
    found = scheduler.find("RLHF")
    assert found is not None and found.running == ""
    # Argo has not written the phase of a new run yet.
    for status in ({"phase": "Running"}, {"phase": "Pending"}, {}):
        run("a", 2, status, "rlhf.prod.rlhf")
        found = scheduler.find("RLHF")
        assert found is not None
        assert (found.running, found.last_run) == ("a", "b")
        assert found.result == "Failed, 2026-11-03T04:00:00Z"


def test_a_state_machine_was_deployed_when_its_definition_was_written(monkeypatch):
    machine = {
        "name": "rlhf.prod.Retrain",
        "stateMachineArn": "arn",
        "creationDate": datetime(2026, 1, 1, tzinfo=UTC),
        "definition": f"step --tag {DEPLOYED}:2026-11-27T18.15.00Z --tag {SETTINGS}:77",
    }
    client = MagicMock()
    client.get_paginator().paginate.return_value = [{"stateMachines": [machine]}]
    client.describe_state_machine.return_value = machine
    client.list_executions.return_value = {"executions": []}
    monkeypatch.setattr(step_functions_scheduler, "get_aws_client", lambda name: client)
    monkeypatch.setattr(step_functions_scheduler, "_cron_of", lambda name: "")
    scheduler = StepFunctionsScheduler(read_deployment(example("step-functions")))
    for deployed_at in ("2026-11-27T18:15:00Z", "2026-01-01 00:00:00+00:00"):
        found = scheduler.find("Retrain")
        assert found is not None and found.deployed_at == deployed_at
        machine["definition"] = "a definition of an earlier version of this project"


@pytest.mark.parametrize(
    "cron", ["61 3 * * MON", "0 3 30 FEB *", "a b c d e", "0 25 ? * FRIL *", "0 3 L-L * ? *"]
)
def test_times_that_never_come_are_refused(cron: str):
    with pytest.raises(ConfigError, match=r"has no next time: .* Correct its fields"):
        next_run(cron, "")
