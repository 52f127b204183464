"""The image of infra/Dockerfile.cpu: built, and run as Docker and Argo Workflows do."""

import base64
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.kubernetes.buildah import Buildah, Container, buildah
from tests.helpers.paths import ROOT
from tests.helpers.runs.scheduled_flow import deployment_variables, flow_command
from tests.helpers.servers.servers import BUCKET, mlflow_server, s3

MISSING = [name for name in ("buildah", "debootstrap") if not shutil.which(name)]

pytestmark = [
    pytest.mark.slow,
    # The build installs torch and all other packages.
    pytest.mark.timeout(7200),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: apt-get install"),
    pytest.mark.skipif(os.geteuid() != 0, reason="building images needs root"),
]

BASE, IMAGE = "localhost/base", "localhost/rlhf"


@pytest.fixture(scope="module")
def built() -> Iterator[Buildah]:
    with buildah() as builder:
        builder.make_debian(BASE, "bookworm", "python3,python3-venv")
        builder.build(IMAGE, ROOT / "infra" / "Dockerfile.cpu", {"BASE": BASE})
        yield builder


@pytest.fixture
def container(built: Buildah) -> Iterator[Container]:
    with built.container(IMAGE) as container:
        yield container


def test_the_user_is_not_root_and_may_write_where_it_starts(container: Container):
    assert container.said("id", "-u") == "1000"
    assert container.said("sh", "-c", "touch made && mkdir metaflow && pwd") == "/app"
    assert container.said("sh", "-c", "command -v python") == "/app/.venv/bin/python"


def test_the_image_has_the_project_and_nothing_that_was_made_on_the_machine(container: Container):
    listed = set(container.said("ls", "-A").split())
    assert {"flows", "ppo_core", "Makefile", ".venv"} <= listed
    assert not listed & {".git", ".metaflow", "outputs", "mlruns", "mlflow.db", ".pytest_cache"}
    kilobytes = int(container.said("du", "-s", "--exclude=.venv", ".").split()[0])
    assert kilobytes < 20_000


def test_the_image_has_what_runs_need_and_no_test_packages(container: Container):
    container.said("python", "-c", "import kubernetes, openai, peft, statsmodels")
    assert container.run("python", "-c", "import pytest").returncode == 1
    assert container.run("python", "-c", "import moto").returncode == 1
    # Otherwise gigabytes of CUDA libraries would be there.
    assert container.said("python", "-c", "import torch; print(torch.version.cuda)") == "None"


def test_the_built_in_task_runs_to_a_registered_version(container: Container):
    run = ("python", "flows/rlhf.py", "run", "--total-episodes", "64")
    ended = container.run(
        *run, "--summary-json", "last.json", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
    promotion = json.loads(container.said("cat", "last.json"))["promotion"]
    assert promotion["version"] == 1
    assert promotion["action"] in ("promoted", "refused")


def start_of_pod(folder: Path, variables: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of the pod of the first step, with Argo's values filled in."""
    ended = flow_command(folder, "argo-workflows", "create", "--only-json", variables=variables)
    assert ended.returncode == 0, ended.stderr[-3000:]
    template: Any = json.loads(ended.stdout)
    parameters = {
        each["name"]: each["value"] for each in template["spec"]["arguments"]["parameters"]
    }
    (pod,) = (each for each in template["spec"]["templates"] if each["name"] == "start")

    def value(placeholder: re.Match[str]) -> str:
        if name := re.search(r"toBase64\(workflow\.parameters\['(.+)'\]\)", placeholder[1]):
            return base64.b64encode(parameters[name[1]].encode()).decode()
        return {"workflow.name": "rlhf-1", "retries": "0"}.get(placeholder[1], "7")

    def filled(text: str) -> str:
        return re.sub(r"\{\{(.+?)\}\}", value, text)

    variables_of_pod = {}
    for each in pod["container"]["env"]:
        # A field of the pod, such as its name, has the field's name as its value here.
        source = each.get("valueFrom") or {"fieldRef": {"fieldPath": ""}}
        found = each.get("value") or source["fieldRef"]["fieldPath"]
        variables_of_pod[each["name"]] = filled(found)
    return [filled(word) for word in pod["container"]["command"]], variables_of_pod


def test_a_step_of_argo_runs_the_code_of_its_package(container: Container, tmp_path: Path):
    with (
        s3() as store,
        mlflow_server(tmp_path, f"s3://{BUCKET}/mlflow", store) as server,
    ):
        variables = deployment_variables(store, tmp_path / "home")
        command, environment = start_of_pod(tmp_path, variables)
        # Without the image's copy of the code, the step needs that of Metaflow's package.
        container.said("rm", "-r", "flows", "ppo_core")
        # Argo mounts a folder for what a step returns.
        container.buildah.said(
            "run", "--user", "0", container.name, "--", "mkdir", "-m", "777", "/mnt/out"
        )
        # What the cluster adds: addresses and credentials.
        cluster = {**store, "MLFLOW_TRACKING_URI": server.url, "OMP_NUM_THREADS": "1"}
        ended = container.run(*command, **(cluster | environment))
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
    assert "Task is starting." in ended.stdout
    assert container.said("ls", "metaflow/.mf_code") != ""
