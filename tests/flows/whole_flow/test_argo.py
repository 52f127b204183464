"""The flow compiled for Argo Workflows, its start in a pod, and its trigger."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs.first_job import of_argo
from tests.helpers.kubernetes.argo_templates import (
    as_argo_reads_it,
    jobsets,
    validate_jobsets,
    validate_pods,
    without_nulls,
)
from tests.helpers.kubernetes.kubernetes_api import Cluster, kubernetes_api
from tests.helpers.paths import ROOT
from tests.helpers.runs.scheduled_flow import deployment_variables, flow_command
from tests.helpers.servers.servers import s3

TEMPLATES = "/apis/argoproj.io/v1alpha1/namespaces/default/workflowtemplates"
WORKFLOWS = "/apis/argoproj.io/v1alpha1/namespaces/default/workflows"

STEPS = {
    1: (
        "start load-policy load-reward-model validate-reward-model train-policy "
        "evaluate-win-rate register end"
    ).split(),
    4: (
        "start join-policy share-policy join-reward-model validate-reward-model join-trained "
        "evaluate-win-rate register end"
    ).split(),
}
"""Steps that run in one pod each, by the number of machines."""

SHARED = {1: [], 4: ["load-policy", "load-reward-model", "train-policy"]}
"""Steps that run on all machines."""

AWKWARD = "a $HOME `id` \\$x é {{workflow.name}} 'b' \"c\""
"""A value of a setting that a shell, or Argo, would change."""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3() as store:
        yield deployment_variables(store, tmp_path_factory.mktemp("home"))


def argo(folder: Path, variables: Mapping[str, str], *arguments: str, **settings: Any) -> Any:
    return flow_command(folder, "argo-workflows", *arguments, variables=variables, **settings)


def compiled(folder: Path, variables: Mapping[str, str], nodes: int) -> Any:
    """The workflow template that `create --only-json` prints."""
    ended = argo(folder, variables, "create", "--only-json", nodes=nodes)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return without_nulls(json.loads(ended.stdout))


@pytest.fixture(scope="module", params=[1, 4])
def template(
    request: pytest.FixtureRequest,
    variables: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[int, Any]:
    folder = tmp_path_factory.mktemp("compiled")
    return request.param, compiled(folder, variables, request.param)


def test_each_step_is_a_pod_and_each_shared_step_a_jobset(template: tuple[int, Any]):
    nodes, compiled = template
    pods = [each["name"] for each in compiled["spec"]["templates"] if "container" in each]
    assert sorted(pods) == sorted([*STEPS[nodes], "error-msg-capture-hook"])
    sets = jobsets(compiled)
    assert sorted(sets) == SHARED[nodes]
    for jobset in sets.values():
        jobs = {job["name"]: job["replicas"] for job in jobset["spec"]["replicatedJobs"]}
        assert jobs == {"control": 1, "worker": 3}


def test_argo_knows_every_key(template: tuple[int, Any]):
    assert as_argo_reads_it(template[1]) == template[1]


def test_a_misspelled_key_is_noticed(template: tuple[int, Any]):
    """The comparison above holds only if it loses keys that Argo does not know."""
    wrong = json.loads(json.dumps(template[1]))
    wrong["spec"]["templates"][-2]["serviceAcountName"] = "name"
    assert "serviceAcountName" not in json.dumps(as_argo_reads_it(wrong))


def test_kubernetes_accepts_every_pod(template: tuple[int, Any]):
    validate_pods(template[1])


def test_kubernetes_accepts_every_jobset_and_its_jobs(template: tuple[int, Any]):
    validate_jobsets(template[1])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with kubernetes_api(tmp_path) as cluster:
        yield cluster


def comparable(template: Any) -> str:
    """The template without what differs between any two compilations."""
    token = template["metadata"]["annotations"]["metaflow/production_token"]
    text = json.dumps(template, sort_keys=True).replace(token, "TOKEN")
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", "TIME", text)
    text = re.sub(r"execution_parameters argo \w{10}|\. `pwd`/\w{10}", "FILE", text)
    # The package has the times of its files' creation.
    return re.sub(r"\b(\w\w)/\1[0-9a-f]{38}|\b[0-9a-f]{40}\b", "PACKAGE", text)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 4])
def test_what_is_deployed_is_what_is_printed(
    nodes: int, cluster: Cluster, variables: dict[str, str], tmp_path: Path
):
    variables = variables | {"KUBECONFIG": str(cluster.kubeconfig)}
    for attempt in ("first", "again"):
        ended = argo(tmp_path, variables, "create", nodes=nodes)
        assert ended.returncode == 0, (attempt, ended.stderr[-3000:])
    stored = without_nulls(cluster.objects[f"{TEMPLATES}/rlhf"])
    assert stored["metadata"].pop("resourceVersion") == "2"
    assert stored["metadata"].pop("creationTimestamp")
    printed = compiled(tmp_path, variables, nodes)
    assert comparable(stored) == comparable(printed)


def deployed_and_triggered(
    folder: Path, cluster: Cluster, variables: Mapping[str, str], *arguments: str
) -> dict[str, Any]:
    """What a run stores that `trigger ARGUMENTS` starts."""
    variables = {**variables, "KUBECONFIG": str(cluster.kubeconfig)}
    created = argo(folder, variables, "create", more=f"registered_model = {json.dumps(AWKWARD)}")
    assert created.returncode == 0, created.stderr[-3000:]
    ended = argo(folder, variables, "trigger", *arguments)
    assert ended.returncode == 0, ended.stderr[-3000:]
    template, triggered = (
        without_nulls(cluster.objects[path])
        for path in (f"{TEMPLATES}/rlhf", f"{WORKFLOWS}/rlhf-1")
    )
    given = {each["name"]: each["value"] for each in triggered["spec"]["arguments"]["parameters"]}
    return of_argo(template, given).store(folder, variables)


@pytest.mark.slow
def test_parameters_that_are_not_given_are_none_and_settings_arrive_as_they_are(
    cluster: Cluster, variables: dict[str, str], tmp_path: Path
):
    stored = deployed_and_triggered(tmp_path, cluster, variables)
    names = (
        "policy reward_model preferences prompts eval_prompts judge processes total_episodes seed "
        "registered_model output_dir summary_json overrides"
    ).split()
    assert {name: stored[name] for name in names if stored[name]} == {}
    assert all(stored[name] is None for name in names if name != "overrides")
    assert stored["accept_reward_model"] is stored["check"] is False
    assert stored["file_settings"]["registered_model"] == AWKWARD


@pytest.mark.slow
def test_triggered_parameters_arrive_as_they_are(
    cluster: Cluster, variables: dict[str, str], tmp_path: Path
):
    value = f"a b\\n\n ; * ~ ! % null {AWKWARD}"
    stored = deployed_and_triggered(
        tmp_path,
        cluster,
        variables,
        *("--policy", "null", "--judge", value, "--seed", "3", "--accept-reward-model"),
        *("--set", "ppo.kl_coef=0.1", "--set", 'sft.dtype="x"'),
    )
    assert (stored["policy"], stored["judge"], stored["seed"]) == ("null", value, 3)
    assert stored["accept_reward_model"] is True
    assert tuple(stored["overrides"]) == ("ppo.kl_coef=0.1", 'sft.dtype="x"')


@pytest.mark.parametrize("scheduler", ["argo-workflows", "step-functions"])
def test_a_setting_that_a_run_would_split_is_refused(
    scheduler: str, variables: dict[str, str], tmp_path: Path
):
    words = ("--set", "ppo.x=1", "--set", "ppo.y=[1, 2]")
    ended = flow_command(tmp_path, scheduler, "trigger", *words, variables=variables)
    assert ended.returncode != 0
    assert "--set 'ppo.y=[1, 2]' has a space" in ended.stderr
    assert "in the settings file" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_parameter_is_required():
    """A schedule gives no parameters: Metaflow takes a default for each, which may be None."""
    code = (
        "import json, runpy, sys; sys.path[:0] = ['.', 'flows']; from metaflow import Parameter; "
        "flow = runpy.run_path('flows/rlhf.py')['RLHF']; "
        "made = [one for one in vars(flow).values() if isinstance(one, Parameter)]; "
        "[one.init() for one in made]; "
        "print(json.dumps({one.name: one.kwargs['required'] for one in made}))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    required = json.loads(ran.stdout)
    assert len(required) > 10
    assert not any(required.values())
