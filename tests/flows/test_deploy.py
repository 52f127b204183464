"""`flows/deploy.py`: a deployment is checked, created, shown, started and deleted."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hera.workflows.models import CronWorkflow

from deploy import main
from deployment.deployed_flow import SETTINGS
from tests.helpers.aws.batch_jobs import Job
from tests.helpers.aws.state_machine import StateMachines
from tests.helpers.kubernetes.argo_templates import as_argo_reads_it, without_nulls
from tests.helpers.kubernetes.kubernetes_api import Cluster
from tests.helpers.paths import ROOT
from tests.helpers.runs.canaries import CANARY, VARIABLES
from tests.helpers.runs.deployments import both_schedulers, example, write_deployment

API = "/apis/argoproj.io/v1alpha1/namespaces/rlhf"
TEMPLATES, CRONS, RUNS = (
    f"{API}/{kind}" for kind in ("workflowtemplates", "cronworkflows", "workflows")
)

START = """
import sys
sys.path[:0] = ["flows"]
from retraining.start_training import start_training
print(start_training({}, "Retrain/7"))
"""
"""What the last step of the flow Retrain does."""


def deploy(
    path: Path, action: str, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    """Exit code, output and messages of the command."""
    capsys.readouterr()
    code = main([str(path), action, *words])
    return code, *capsys.readouterr()


def start_training(variables: dict[str, str]) -> str:
    """What a step of the flow Retrain starts, in the environment of its container."""
    ran = subprocess.run(
        [sys.executable, "-c", START],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("--check", "'missing.toml' cannot be read"),
        ("--create", "'missing.toml' cannot be read"),
        ("--status", "'missing.toml' cannot be read"),
        ("--delete", "'missing.toml' cannot be read"),
    ],
)
def test_a_file_that_is_not_there_is_refused(action: str, message: str, capsys):
    code, output, messages = deploy(Path("missing.toml"), action, capsys)
    assert (code, output) == (1, "")
    assert message in messages


def test_an_empty_file_is_refused(tmp_path: Path, capsys):
    (tmp_path / "empty.toml").write_text("# nothing\n")
    code, _, messages = deploy(tmp_path / "empty.toml", "--check", capsys)
    assert code == 1
    assert "is empty. infra/deployments has an example of each scheduler." in messages


def test_a_secret_in_either_file_is_refused_with_its_place(tmp_path: Path, capsys):
    files = write_deployment(
        tmp_path, "argo", settings={"judging": {"base_url": f"http://x:{CANARY}1@h/v1"}}
    )
    code, output, messages = deploy(files.path, "--check", capsys)
    assert code == 1
    assert f"{files.settings}: judging.base_url holds an address with a user" in messages
    assert CANARY not in output + messages
    tables = {**example("argo"), "defaults": {"environment": {"HF_TOKEN": f"{CANARY}1"}}}
    files.path.write_text(tomli_w.dumps(tables))
    code, output, messages = deploy(files.path, "--create", capsys)
    assert code == 1
    assert "defaults.environment.HF_TOKEN holds a secret, judging by its name" in messages
    assert CANARY not in output + messages


@pytest.mark.slow
def test_several_machines_on_step_functions_are_refused(tmp_path: Path, capsys):
    files = write_deployment(tmp_path, "step-functions", settings={"num_nodes": 2})
    code, _, messages = deploy(files.path, "--check", capsys)
    assert code == 1
    assert "num_nodes=2 is not possible with step-functions" in messages
    assert "Traceback" not in messages


@pytest.fixture(scope="module")
def schedulers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StateMachines, Cluster]]:
    folder = tmp_path_factory.mktemp("cluster")
    with both_schedulers(folder) as both, pytest.MonkeyPatch.context() as environment:
        for name in ("OPENAI_API_KEY", "HF_TOKEN", "DATABASE_URL", "SERVICE_PASSWORD"):
            environment.setenv(name, VARIABLES[name])
        yield both


def check_objects_of_argo(cluster: Cluster) -> None:
    """Check both templates and the schedule, as `create` leaves them."""
    for flow in ("rlhf", "retrain"):
        template = without_nulls(cluster.objects[f"{TEMPLATES}/rlhf.prod.{flow}"])
        mutex = {"mutexes": [{"name": f"rlhf.prod.{flow}"}]}
        assert template["spec"]["synchronization"] == mutex
        assert as_argo_reads_it(template)["spec"] == template["spec"]
        assert f"{SETTINGS}:" in template["metadata"]["annotations"]["metaflow/tags"]
    assert [path for path in cluster.objects if path.startswith(CRONS)] == [
        f"{CRONS}/rlhf.prod.retrain"
    ]
    cron = without_nulls(cluster.objects[f"{CRONS}/rlhf.prod.retrain"])
    assert cron["spec"]["concurrencyPolicy"] == "Forbid"
    assert cron["spec"]["schedules"] == ["0 3 * * MON"]
    assert cron["spec"]["timezone"] == "Europe/Berlin"
    known = CronWorkflow.model_validate(cron)
    dumped = known.model_dump_json(by_alias=True, exclude_none=True, exclude_unset=True)
    assert json.loads(dumped)["spec"] == cron["spec"]


def variable_of_argo(cluster: Cluster, name: str) -> str:
    """An environment variable of the pods of the flow Retrain."""
    template = cluster.objects[f"{TEMPLATES}/rlhf.prod.retrain"]
    pod = next(one for one in template["spec"]["templates"] if one["name"] == "end")
    return next(one["value"] for one in pod["container"]["env"] if one["name"] == name)


def refuse_somebody_else(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that another user changes a deployment with its token only, which `--status` prints."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("METAFLOW_USER", "somebody-else")
        environment.setenv("METAFLOW_TOKEN_HOME", str(path.parent / "tokens"))
        for action in ("--create", "--delete"):
            code, _, messages = deploy(path, action, capsys)
            assert code == 1
            assert "--status` prints its token: repeat your command with --authorize" in messages
        token = re.search(r"mfprj-\w+-0-\w+", deploy(path, "--status", capsys)[1])
        assert token is not None
        assert main([str(path), "--create", "--authorize", f"{token[0]}x"]) == 1
        assert main([str(path), "--create", "--authorize", token[0]]) == 0


def refuse_deletion(path: Path, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that nothing is deleted while a run of RLHF has not ended."""
    code, output, messages = deploy(path, "--delete", capsys)
    assert (code, output) == (1, "")
    assert f"deploy: The run {run} of " in messages
    assert "has not ended, so nothing was deleted" in messages


def stop_schedule(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Deploy a file without its schedule, and check that the flows stay and nothing starts."""
    tables = tomllib.loads(path.read_text())
    del tables["schedule"]
    path.write_text(tomli_w.dumps(tables))
    code, _, messages = deploy(path, "--create", capsys)
    assert code == 0, messages
    output = deploy(path, "--status", capsys)[1]
    assert "not deployed" not in output
    assert re.search(r"next start +\S* *none +\S* *none", output), output


def test_authorize_has_no_effect_on_the_status(tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "argo.toml"), "--status", "--authorize", "x"])
    assert "--authorize has no effect with --status" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["--check", "--create", "--status", "--delete"])
def test_only_a_start_takes_the_lease_over(action: str, tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "argo.toml"), action, "--take-over"])
    assert "--take-over has an effect only with --start: remove it." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_life_of_a_deployment_to_argo(
    schedulers: tuple[StateMachines, Cluster], tmp_path: Path, capsys
):
    _, cluster = schedulers
    path = write_deployment(tmp_path, "argo").path
    assert "not deployed" in deploy(path, "--status", capsys)[1]
    # The second time, the objects are replaced.
    for _ in range(2):
        code, output, messages = deploy(path, "--create", capsys)
        assert code == 0, messages
        assert output.endswith("Deployed rlhf.prod.rlhf.\nDeployed rlhf.prod.retrain.\n")
        check_objects_of_argo(cluster)
    assert CANARY not in json.dumps(cluster.objects) + output + messages

    refuse_somebody_else(path, capsys)

    template = variable_of_argo(cluster, "ARGO_WORKFLOW_TEMPLATE")
    # The namespace of a pod is a field of it.
    variables = {"ARGO_WORKFLOW_TEMPLATE": template, "METAFLOW_KUBERNETES_NAMESPACE": "rlhf"}
    assert start_training(variables) == "RLHF/argo-rlhf.prod.rlhf-1"
    run = cluster.objects[f"{RUNS}/rlhf.prod.rlhf-1"]
    assert run["spec"]["workflowTemplateRef"] == {"name": "rlhf.prod.rlhf"}
    lease = {"name": "lease", "value": '"Retrain/7"'}
    assert run["spec"]["arguments"]["parameters"] == [lease]
    refuse_deletion(path, "rlhf.prod.rlhf-1", capsys)

    # Argo writes the state of a run.
    run["status"] = {"phase": "Failed", "finishedAt": "2026-11-30T04:00:00Z"}
    with (tmp_path / "qwen2.5-0.5b.toml").open("a") as settings:
        settings.write("\n[promotion]\nmax_kl = 30.0\n")
    code, output, messages = deploy(path, "--status", capsys)
    assert code == 0, messages
    for shown in ("rlhf.prod.rlhf-1", "Failed, 2026-11-30T04:00:00Z", "the file has", " 03:00 CE"):
        assert shown in output

    # The API of the test gives each run the same name.
    for words, value in ((), "false"), (("--take-over",), "true"):
        started = deploy(path, "--start", capsys, *words)
        assert started[:2] == (0, "Started rlhf.prod.retrain. --status has its result.\n"), started
        run = cluster.objects.pop(f"{RUNS}/rlhf.prod.retrain-1")
        assert run["spec"]["arguments"]["parameters"] == [{"name": "take-over", "value": value}]
    assert deploy(path, "--delete", capsys)[:2] == (
        0,
        "Deleted rlhf.prod.retrain.\nDeleted rlhf.prod.rlhf.\n",
    )
    runs = [
        cluster.objects[name]["spec"]["workflowTemplateRef"]["name"] for name in cluster.objects
    ]
    assert runs == ["rlhf.prod.rlhf"]
    code, _, messages = deploy(path, "--start", capsys)
    assert code == 1 and "rlhf.prod.retrain is not deployed. Deploy it first" in messages
    assert deploy(path, "--delete", capsys)[:2] == (
        0,
        "rlhf.prod.retrain is not deployed.\nrlhf.prod.rlhf is not deployed.\n",
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_life_of_a_deployment_to_step_functions(
    schedulers: tuple[StateMachines, Cluster], tmp_path: Path, capsys
):
    machines, _ = schedulers
    # The first step refuses this address, and says it: it has read the secret.
    secret = json.dumps({"MLFLOW_REGISTRY_URI": "sqlite:///of-the-secret.db"})
    machines.client("secretsmanager").create_secret(Name="rlhf/mlflow", SecretString=secret)
    path = write_deployment(tmp_path, "step-functions").path
    for _ in range(2):
        code, output, messages = deploy(path, "--create", capsys)
        assert code == 0, messages
        assert output.endswith("Deployed rlhf.prod.RLHF.\nDeployed rlhf.prod.Retrain.\n")
    events, states = machines.client("events"), machines.client("stepfunctions")
    arns = {
        one["name"]: one["stateMachineArn"] for one in states.list_state_machines()["stateMachines"]
    }
    assert sorted(arns) == ["rlhf.prod.RLHF", "rlhf.prod.Retrain"]
    (rule,) = events.list_rules()["Rules"]
    assert (rule["ScheduleExpression"], rule["State"]) == ("cron(0 2 ? * MON *)", "ENABLED")
    (target,) = events.list_targets_by_rule(Rule=rule["Name"])["Targets"]
    assert target["Arn"] == arns["rlhf.prod.Retrain"]
    for arn in arns.values():
        definition = states.describe_state_machine(stateMachineArn=arn)["definition"]
        assert CANARY not in definition + output + messages

    refuse_somebody_else(path, capsys)

    started = start_training({"SFN_STATE_MACHINE": "rlhf.prod.Retrain"})
    (execution,) = states.list_executions(stateMachineArn=arns["rlhf.prod.RLHF"])["executions"]
    assert started == f"RLHF/sfn-{execution['name']}"
    refuse_deletion(path, execution["name"], capsys)
    job = wait_for_end(states, machines, execution)
    assert "MLFLOW_REGISTRY_URI='sqlite:///of-the-secret.db' would give each step" in job.log

    code, output, messages = deploy(path, "--status", capsys)
    assert code == 0, messages
    for shown in (execution["name"], "FAILED, ", " 02:00 UTC"):
        assert shown in output
    assert deploy(path, "--start", capsys, "--take-over")[0] == 0
    (execution,) = states.list_executions(stateMachineArn=arns["rlhf.prod.Retrain"])["executions"]
    given = states.describe_execution(executionArn=execution["executionArn"])["input"]
    assert json.loads(json.loads(given)["Parameters"]) == {"take-over": True}
    stop_schedule(path, capsys)
    assert [each["State"] for each in events.list_rules()["Rules"]] == ["DISABLED"]
    assert deploy(path, "--delete", capsys)[:2] == (
        0,
        "Deleted rlhf.prod.Retrain.\nDeleted rlhf.prod.RLHF.\n",
    )
    assert events.list_rules()["Rules"] == states.list_state_machines()["stateMachines"] == []
    assert machines.client("s3").list_objects_v2(Bucket="artifacts")["KeyCount"] > 0


def wait_for_end(states: Any, machines: StateMachines, execution: Any) -> Job:
    """Wait for the end of an execution, and return its only job."""
    deadline = time.monotonic() + 120
    while states.describe_execution(executionArn=execution["executionArn"])["status"] == "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    (job,) = (one for one in machines.jobs.ended if one.execution == execution["name"])
    return job
