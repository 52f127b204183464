"""The next time of a schedule, as Argo and EventBridge compute it."""

import json
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from deployment import step_functions_scheduler
from deployment.argo_scheduler import ArgoScheduler
from deployment.deployed_flow import CHANGES, COMMIT, DEPLOYED, DEPLOYMENT, SETTINGS
from deployment.deployment_file import read_deployment
from deployment.overview import next_run, render_deployment, render_status
from deployment.step_functions_scheduler import StepFunctionsScheduler
from pipeline.settings.overrides import merge_tables
from ppo_core.errors import ConfigError
from tests.helpers.kubernetes.kubernetes_api import kubernetes_api
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


def test_the_state_on_argo_has_a_schedule_of_either_form(tmp_path: Path, monkeypatch):
    name = "rlhf.prod.retrain"
    path = "/apis/argoproj.io/v1alpha1/namespaces/rlhf/{}/" + name
    deployment = read_deployment(example("argo"))
    with kubernetes_api(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
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
