"""The files in infra/kubernetes: known to Kubernetes and Argo, complete, without secrets."""

import json

import kubernetes_validate
import pytest
from hera.workflows.models import Workflow

from tests.helpers.kubernetes.kubernetes_files import FOLDER, argo_defaults, kustomization, objects

KUBERNETES = "1.37"
"""Version whose schemas the objects are compared with."""


CLUSTER = {"Namespace", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
"""Kinds without a namespace."""


def name_of(found: dict) -> str:
    return f"{found['kind']}-{found['metadata']['name']}"


@pytest.mark.parametrize("found", objects(), ids=name_of)
def test_kubernetes_knows_every_key(found: dict):
    kubernetes_validate.validate(found, KUBERNETES, strict=True)


@pytest.mark.parametrize("found", objects(), ids=name_of)
def test_an_object_is_in_the_namespace_unless_it_belongs_to_the_cluster(found: dict):
    metadata = found["metadata"]
    if found["kind"] in CLUSTER:
        assert "namespace" not in metadata
        assert metadata["name"].startswith("rlhf")
    else:
        assert metadata["namespace"] == "rlhf"


def test_the_kustomization_names_every_file_once():
    assert set(kustomization()) == {"apiVersion", "kind", "resources"}
    assert kustomization()["kind"] == "Kustomization"
    apart = {"kustomization.yaml", "argo-defaults.yaml"}
    files = {path.name for path in FOLDER.glob("*.yaml")} - apart
    assert sorted(kustomization()["resources"]) == sorted(files)


def test_no_two_objects_have_the_same_name():
    names = [name_of(each) for each in objects()]
    assert len(names) == len(set(names))


def test_no_object_carries_values_that_could_be_secret():
    assert not objects("Secret") + objects("ConfigMap")


def test_argo_knows_every_key_of_the_defaults():
    defaults = argo_defaults()["workflowDefaults"]
    whole = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {}, **defaults}
    known = Workflow.model_validate(whole)
    dumped = known.model_dump_json(by_alias=True, exclude_none=True, exclude_unset=True)
    assert json.loads(dumped) == whole


def test_the_container_of_argo_is_known_to_kubernetes():
    container = {"name": "wait", "image": "argoexec", **argo_defaults()["executor"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
    spec = {"containers": [container], "restartPolicy": "Never"}
    kubernetes_validate.validate({**pod, "spec": spec}, KUBERNETES, strict=True)


def test_argo_runs_deployed_templates_only_with_an_account_of_the_files():
    defaults = argo_defaults()
    # `Secure` would end a run whose template is deployed again or deleted during the run.
    assert defaults["workflowRestrictions"] == {"templateReferencing": "Strict"}
    account = defaults["workflowDefaults"]["spec"]["serviceAccountName"]
    assert account in {each["metadata"]["name"] for each in objects("ServiceAccount")}


def test_a_workflow_is_kept_for_four_weekly_runs_and_in_the_end_deleted():
    ttl = argo_defaults()["workflowDefaults"]["spec"]["ttlStrategy"]["secondsAfterCompletion"]
    assert 4 * 7 * 24 * 3600 < ttl < 10 * 7 * 24 * 3600
    kept = argo_defaults()["retentionPolicy"]
    # Each week has a Workflow of the flow Retrain and one of the flow RLHF.
    assert set(kept) == {"completed", "failed", "errored"}
    assert min(kept.values()) >= 2 * 5
