"""The flow Retrain tells the name of the flow RLHF from its own, as Metaflow makes both."""

import itertools
from types import SimpleNamespace

import pytest
from metaflow import current
from metaflow.plugins.argo.argo_workflows_cli import resolve_workflow_name_v2
from metaflow.plugins.aws.step_functions.step_functions_cli import resolve_state_machine_name
from metaflow.plugins.project_decorator import format_name

from deployment.argo_scheduler import ArgoScheduler
from deployment.deployment import Deployment
from deployment.step_functions_scheduler import StepFunctionsScheduler
from ppo_core.errors import ConfigError
from retraining.start_training import training_name

PROJECTS = ("rlhf", "my_project", "a1_", "_x", "p" * 32)
BRANCHES = ("", "stage_1", "_", "b" * 20)


def names_by_metaflow(flow: str, project: str, branch: str) -> tuple[str, str]:
    """What Metaflow calls a flow of a deployment: on Argo, and on Step Functions."""
    name, metaflow_branch = format_name(flow, project, True, branch or None, "me")
    values = {"project_name": project, "branch_name": metaflow_branch}
    current._update_env({**values, "flow_name": flow, "project_flow_name": name})
    return resolve_workflow_name_v2(None, None)[0], resolve_state_machine_name(
        SimpleNamespace(), None
    )[0]


@pytest.mark.parametrize(("project", "branch"), [*itertools.product(PROJECTS, BRANCHES)])
def test_every_name_that_is_not_refused_tells_the_other(
    project: str, branch: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("project_name", "branch_name", "flow_name", "project_flow_name"):
        monkeypatch.setattr(type(current), name, None, raising=False)
    try:
        deployment = Deployment(scheduler="argo", project=project, branch=branch)
    except ConfigError:
        assert len(f"{project}.prod.{branch}.Retrain") > 45
        return
    retrain = names_by_metaflow("Retrain", project, branch)
    training = names_by_metaflow("RLHF", project, branch)
    assert tuple(map(training_name, retrain)) == training
    for scheduler, name in zip(
        (ArgoScheduler(deployment), StepFunctionsScheduler(deployment)), training, strict=True
    ):
        assert scheduler.name_of("RLHF") == name
