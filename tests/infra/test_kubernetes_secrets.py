"""Which pods get the Secret of the judge's key and that of the registry's writer."""

from typing import Any

import cel
import pytest

from tests.helpers.kubernetes.kubernetes_files import objects

OWNERS = {"rlhf-judge": "rlhf-judge", "rlhf-registry": "rlhf-register"}
"""Secrets with the only account that gets them."""


def is_admitted(pod: Any) -> bool:
    """Evaluate the policy as the API of Kubernetes does when a pod is created."""
    (policy,) = objects("ValidatingAdmissionPolicy")
    variables: dict[str, Any] = {}
    for each in policy["spec"]["variables"]:
        variables[each["name"]] = cel.evaluate(each["expression"], {"object": pod})
    context = {"object": pod, "variables": variables}
    found = [cel.evaluate(each["expression"], context) for each in policy["spec"]["validations"]]
    assert set(found) <= {True, False}
    return all(found)


def pods_with(secret: str) -> dict[str, Any]:
    """Specifications of pods, each of which gets the Secret in its own way."""
    plain = {"name": "main", "image": "image"}
    from_all = plain | {
        "envFrom": [{"configMapRef": {"name": "a"}}, {"secretRef": {"name": secret}}]
    }
    key = {"name": secret, "key": "OPENAI_API_KEY"}
    from_key = plain | {
        "env": [{"name": "a", "value": "b"}, {"name": "c", "valueFrom": {"secretKeyRef": key}}]
    }
    projected = {
        "projected": {"sources": [{"configMap": {"name": "a"}}, {"secret": {"name": secret}}]}
    }
    return {
        "environment": {"containers": [plain, from_all]},
        "variable": {"containers": [from_key]},
        "first container": {"containers": [plain], "initContainers": [from_all]},
        "debugger": {"containers": [plain], "ephemeralContainers": [from_key]},
        "volume": {
            "containers": [plain],
            "volumes": [{"emptyDir": {}}, {"secret": {"secretName": secret}}],
        },
        "projected volume": {"containers": [plain], "volumes": [projected]},
    }


@pytest.mark.parametrize("way", pods_with(""))
@pytest.mark.parametrize("secret", OWNERS)
def test_a_guarded_secret_is_for_pods_of_its_account_only(secret: str, way: str):
    accounts = {each["metadata"]["name"] for each in objects("ServiceAccount")} | {"default", ""}
    admitted = {
        account
        for account in accounts
        if is_admitted({"spec": pods_with(secret)[way] | {"serviceAccountName": account}})
    }
    assert admitted == {OWNERS[secret]}
    assert not is_admitted({"spec": pods_with(secret)[way]})


@pytest.mark.parametrize("way", pods_with(""))
def test_other_secrets_are_for_every_pod(way: str):
    assert is_admitted(
        {"spec": pods_with("rlhf-mlflow")[way] | {"serviceAccountName": "rlhf-train"}}
    )
    assert is_admitted({"spec": {"containers": [{"name": "main"}]}})


def test_the_policy_denies_pods_in_the_namespace():
    (binding,) = objects("ValidatingAdmissionPolicyBinding")
    (policy,) = objects("ValidatingAdmissionPolicy")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["validationActions"] == ["Deny"]
    chosen = binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"]
    (namespace,) = objects("Namespace")
    assert chosen == {"kubernetes.io/metadata.name": namespace["metadata"]["name"]}
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert rule["operations"] == ["CREATE", "UPDATE"]
    assert rule["resources"] == ["pods", "pods/ephemeralcontainers"]
    assert policy["spec"]["failurePolicy"] == "Fail"
