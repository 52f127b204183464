"""The flow compiled for Argo Workflows, its start in a pod, and its trigger."""

import base64
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hera.workflows.models import WorkflowTemplate
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from pipeline.settings.command_line import refuse_changed_values
from ppo_core.errors import ConfigError
from tests.helpers.kubernetes_api import Cluster, kubernetes_api
from tests.helpers.paths import ROOT
from tests.helpers.scheduled_flow import deployment_variables, flow_command
from tests.helpers.servers import s3

KUBERNETES = "1.37"
"""Version whose schemas the pods and jobs are compared with."""

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
    known = WorkflowTemplate.model_validate(template[1])
    dumped = known.model_dump_json(by_alias=True, exclude_none=True, exclude_unset=True)
    assert json.loads(dumped) == template[1]


def test_a_misspelled_key_is_noticed(template: tuple[int, Any]):
    """The comparison above holds only if it loses keys that Argo does not know."""
    wrong = json.loads(json.dumps(template[1]))
    wrong["spec"]["templates"][-2]["serviceAcountName"] = "name"
    known = WorkflowTemplate.model_validate(wrong)
    assert "serviceAcountName" not in known.model_dump_json(by_alias=True, exclude_unset=True)


def test_kubernetes_accepts_every_pod(template: tuple[int, Any]):
    for each in template[1]["spec"]["templates"]:
        if "container" not in each:
            continue
        keys = ("volumes", "nodeSelector", "tolerations", "serviceAccountName")
        # Argo names the container.
        spec = {"containers": [{"name": "main", **each["container"]}], "restartPolicy": "Never"}
        spec |= {key: each[key] for key in keys if key in each}
        metadata = {"name": each["name"], **each.get("metadata", {})}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_kubernetes_accepts_every_jobset_and_its_jobs(template: tuple[int, Any]):
    for name, jobset in jobsets(template[1]).items():
        known = JobsetV1alpha2JobSet.from_dict(jobset)
        assert known is not None
        assert without_nulls(known.to_dict()) == jobset
        for job in jobset["spec"]["replicatedJobs"]:
            whole = {"apiVersion": "batch/v1", "kind": "Job", **job["template"]}
            whole["metadata"] = {"name": name, **whole["metadata"]}
            kubernetes_validate.validate(whole, KUBERNETES, strict=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with kubernetes_api(tmp_path) as cluster:
        yield cluster


def comparable(template: Any) -> str:
    """The template without what differs between any two compilations."""
    token = template["metadata"]["annotations"]["metaflow/production_token"]
    text = json.dumps(template, sort_keys=True).replace(token, "TOKEN")
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", "TIME", text)
    text = re.sub(r"set_parameters \w{10}|\. `pwd`/\w{10}", "FILE", text)
    # The package has the times of its files' creation.
    return re.sub(r"\b(\w\w)/\1[0-9a-f]{38}|\b[0-9a-f]{40}\b", "PACKAGE", text)


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


def parameters_in_the_run(
    folder: Path, template: Any, triggered: Any, variables: Mapping[str, str]
) -> dict[str, Any]:
    """What the first pod's command stores of the parameters and the settings.

    The command is the pod's own, up to the first step: it fetches the code package, and stores the
    parameters. Then they are read with the packaged flow.
    """
    parameters = {
        each["name"]: each["value"]
        for source in (template, triggered)
        for each in source["spec"]["arguments"]["parameters"]
    }
    (pod,) = (each for each in template["spec"]["templates"] if each["name"] == "start")
    script = filled(pod["container"]["command"][-1], parameters)
    until_step = re.compile(
        r"&& echo argo-rlhf-1\S+ >> /tmp/mf-input-paths && (.+?) step start .*?\)"
    )
    dump = rf"&& \1 dump --file {folder}/stored argo-rlhf-1/_parameters/$METAFLOW_TASK_ID-params)"
    script, count = until_step.subn(dump, script)
    assert count == 1
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "METAFLOW_SKIP_INSTALL_DEPENDENCIES": "1",
        **variables,
        **{one["name"]: one["value"] for one in pod["container"]["env"] if "value" in one},
    }
    (folder / "pod").mkdir()
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=folder / "pod",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (folder / "stored").exists(), ran.stdout[-3000:] + ran.stderr[-3000:]
    (stored,) = pickle.loads((folder / "stored").read_bytes()).values()
    return stored


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
    return parameters_in_the_run(folder, template, triggered, variables)


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


def test_triggered_parameters_arrive_as_they_are(
    cluster: Cluster, variables: dict[str, str], tmp_path: Path
):
    value = "a b\\n 'c' \"d\" ; * ~ ! % {{workflow.name}} null"
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


PASSED = ["a b", "a\\b", 'q"q', "it's", "a;b", "a!b", "null", "12", "*", "~", "", "a%b", "{{x}}"]
"""Values that arrive as they are."""

CHANGED = ["a$HOME", "$(id)", "${HOME}", "\\$HOME", "$$", "a`id`b", "é", "a\nb", "a\tb", "\x7f"]
"""Values that do not."""


def exported(folder: Path, value: str, scheduler: str) -> str:
    """The value that the shell of a scheduled run has of a parameter."""
    text = json.dumps({"policy": value})
    module, arguments = {
        "argo": ("argo.set_parameters", ["file", f"policy,t,{encoded(json.dumps(value))}"]),
        "step-functions": ("aws.step_functions.set_batch_environment", ["parameters", "file"]),
    }[scheduler]
    export = [sys.executable, "-m", f"metaflow.plugins.{module}", *arguments]
    environment = {**os.environ, "METAFLOW_PARAMETERS": text}
    subprocess.run(export, cwd=folder, env=environment, check=True)
    read = '. ./file && printf "%s" "$METAFLOW_INIT_POLICY"'
    return subprocess.run(
        ["bash", "-c", read], cwd=folder, stdout=subprocess.PIPE, check=True
    ).stdout.decode()


@pytest.mark.parametrize("scheduler", ["argo", "step-functions"])
@pytest.mark.parametrize("value", [*PASSED, *CHANGED])
def test_exactly_the_values_that_the_shell_changes_are_refused(
    value: str, scheduler: str, tmp_path: Path
):
    arrives = exported(tmp_path, value, scheduler) == value
    assert arrives is (value in PASSED)
    if arrives:
        refuse_changed_values({"policy": value})
    else:
        with pytest.raises(ConfigError, match=r"--policy .* would arrive changed"):
            refuse_changed_values({"policy": value})


@pytest.mark.parametrize("scheduler", ["argo-workflows", "step-functions"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--policy", "models/$NAME"),
            "--policy 'models/$NAME' has '$', which would arrive changed",
        ),
        (("--judge=a`id`",), "--judge 'a`id`' has '`'"),
        (("--reward-model", "modèle"), "--reward-model 'modèle' has 'è'"),
        (("--prompts", "a\nb"), r"--prompts 'a\nb' has '\n'"),
        (("--set", "judge=$X"), "--set 'judge=$X' has '$'"),
        (("--set", "ppo.x=1", "--set", "ppo.y=[1, 2]"), "--set 'ppo.y=[1, 2]' has a space"),
    ],
)
def test_a_parameter_that_would_arrive_changed_is_refused(
    scheduler: str,
    arguments: tuple[str, ...],
    message: str,
    variables: dict[str, str],
    tmp_path: Path,
):
    ended = flow_command(tmp_path, scheduler, "trigger", *arguments, variables=variables)
    assert ended.returncode != 0
    assert message in ended.stderr
    assert "in the settings file" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_parameter_in_the_environment_is_refused_too(variables: dict[str, str], tmp_path: Path):
    name = "METAFLOW_ARGO_WORKFLOWS_TRIGGER_POLICY"
    ended = argo(tmp_path, {**variables, name: "$NAME"}, "trigger")
    assert ended.returncode != 0
    assert "--policy '$NAME' has '$'" in ended.stderr


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
