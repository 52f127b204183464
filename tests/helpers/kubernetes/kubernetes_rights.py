"""What service accounts may do, by the Roles and RoleBindings of a namespace."""

from collections.abc import Iterator
from typing import Any

VERBS = "create delete deletecollection get list patch update watch bind escalate".split()


def is_allowed(objects: list[Any], account: str, verb: str, group: str, resource: str) -> bool:
    """Return whether a service account may use a verb on all objects of a resource.

    Args:
        objects: Kubernetes objects of one namespace, among them its Roles and RoleBindings.
        account: name of the service account.
        verb: verb of Kubernetes.
        group: API group; empty for the core group.
        resource: plural name, with its subresource after a slash.
    """
    return any(
        _covers(rule["verbs"], verb)
        and _covers(rule["apiGroups"], group)
        and _covers(rule["resources"], resource)
        for rule in _rules(objects, account)
        if "resourceNames" not in rule
    )


def _covers(named: list[str], one: str) -> bool:
    return one in named or "*" in named


def _rules(objects: list[Any], account: str) -> Iterator[Any]:
    roles = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Role"}
    for binding in objects:
        if binding["kind"] != "RoleBinding":
            continue
        bound = [(each["kind"], each["name"]) for each in binding["subjects"]]
        if ("ServiceAccount", account) in bound:
            yield from roles[binding["roleRef"]["name"]]["rules"]
