"""Rights of the service accounts in infra/kubernetes, and what Metaflow asks for."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.kubernetes.kubernetes_api import Cluster, kubernetes_api
from tests.helpers.kubernetes.kubernetes_files import objects
from tests.helpers.kubernetes.kubernetes_rights import VERBS, is_allowed
from tests.helpers.paths import ROOT
from tests.helpers.runs.scheduled_flow import deployment_variables, flow_command
from tests.helpers.servers.servers import s3

ARGO = "argoproj.io"

RESOURCES = [
    *((ARGO, f"{name}s") for name in ("workflow", "workflowtemplate", "workflowtaskresult")),
    *((ARGO, f"{name}s") for name in ("cronworkflow", "sensor", "workflowtaskset")),
    ("jobset.x-k8s.io", "jobsets"),
    ("batch", "jobs"),
    *(("", name) for name in ("pods", "pods/exec", "pods/log", "secrets", "configmaps")),
    *(("", name) for name in ("serviceaccounts", "serviceaccounts/token")),
    ("networking.k8s.io", "networkpolicies"),
    *(("rbac.authorization.k8s.io", name) for name in ("roles", "rolebindings")),
]
"""API group and resource of what an account could have rights to."""

REPORT = {"create workflowtaskresults", "patch workflowtaskresults"}
"""What Argo's own container in each pod needs."""

EXPECTED = {
    "rlhf-retrain": REPORT | {"get workflowtemplates", "create workflows"},
    "rlhf-train": REPORT,
    "rlhf-judge": REPORT,
    "rlhf-register": REPORT,
    "rlhf-argo": REPORT | {"create jobsets", "get jobsets"},
    "rlhf-consumer": set(),
    "rlhf-deploy": {
        f"{verb} {resource}"
        for verb in ("create", "delete", "get", "list", "update")
        for resource in ("workflowtemplates", "cronworkflows", "sensors")
    }
    | {f"{verb} workflows" for verb in ("create", "get", "list", "patch")},
    "default": set(),
}
"""All that each account may do."""


def rights(account: str) -> set[str]:
    return {
        f"{verb} {resource}"
        for verb in VERBS
        for group, resource in RESOURCES
        if is_allowed(objects(), account, verb, group, resource)
    }


@pytest.mark.parametrize("account", EXPECTED)
def test_an_account_may_do_what_its_duty_needs_and_nothing_else(account: str):
    assert rights(account) == EXPECTED[account]


def test_each_account_of_the_files_is_in_the_table():
    accounts = {each["metadata"]["name"] for each in objects("ServiceAccount")}
    assert accounts == set(EXPECTED) - {"default"}


def test_each_binding_is_of_a_role_and_of_accounts_in_the_files():
    roles = {each["metadata"]["name"] for each in objects("Role")}
    for binding in objects("RoleBinding"):
        assert binding["roleRef"]["kind"] == "Role"
        assert binding["roleRef"]["name"] in roles
        for subject in binding["subjects"]:
            assert subject["kind"] == "ServiceAccount"
            assert subject["namespace"] == "rlhf"
            assert subject["name"] in EXPECTED
    assert not objects("ClusterRole") + objects("ClusterRoleBinding")


def test_only_accounts_of_pods_that_call_kubernetes_have_a_token_in_their_pods():
    without = {
        each["metadata"]["name"]
        for each in objects("ServiceAccount")
        if each.get("automountServiceAccountToken") is False
    }
    assert without == {"rlhf-consumer", "rlhf-deploy"}


VERB_OF = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def calls(cluster: Cluster) -> set[tuple[str, str, str]]:
    """Verb, group and resource of all requests that the API got."""
    found = set()
    for method, path in cluster.requests:
        group, _, *within = path.removeprefix("/apis/").split("/")
        _, namespace, resource, *name = within
        assert namespace == "rlhf"
        read = "get" if name else "list"
        found.add((VERB_OF.get(method, read), group, resource))
    return found


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3() as store:
        yield deployment_variables(store, tmp_path_factory.mktemp("home"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with kubernetes_api(tmp_path) as cluster:
        yield cluster


@pytest.mark.slow
def test_metaflow_deploys_and_starts_with_the_rights_of_the_accounts(
    cluster: Cluster, variables: dict[str, str], tmp_path: Path
):
    variables |= {"KUBECONFIG": str(cluster.kubeconfig), "METAFLOW_KUBERNETES_NAMESPACE": "rlhf"}
    for _ in range(2):
        created = flow_command(tmp_path, "argo-workflows", "create", variables=variables)
        assert created.returncode == 0, created.stderr[-3000:]
    deploying = calls(cluster)
    assert {verb for verb, *_ in deploying} >= {"create", "get", "update"}
    assert all(is_allowed(objects(), "rlhf-deploy", *call) for call in deploying), deploying

    cluster.requests.clear()
    start = "from retraining.start_training import start_training; print(start_training({}, 'me'))"
    pod = {"ARGO_WORKFLOW_TEMPLATE": "retrain", "METAFLOW_USER": "argo-workflows"}
    environment = {**os.environ, **variables, **pod, "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"}
    started = subprocess.run(
        [sys.executable, "-c", start], env=environment, capture_output=True, text=True, check=False
    )
    assert started.stdout == "RLHF/argo-rlhf-1\n", started.stderr[-3000:]
    starting = calls(cluster)
    assert (VERB_OF["POST"], ARGO, "workflows") in starting
    assert all(is_allowed(objects(), "rlhf-retrain", *call) for call in starting), starting
