"""Which connections NetworkPolicies allow."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any


@dataclass(frozen=True)
class Pod:
    """A pod; its namespace has the one label that Kubernetes gives it."""

    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outside:
    """An address outside the cluster."""

    address: str


Peer = Pod | Outside


def can_connect(
    policies: list[Any], source: Peer, target: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Return whether the policies at both ends allow a connection."""
    leaves = isinstance(source, Outside) or _is_allowed(
        policies, source, "egress", target, port, protocol
    )
    enters = isinstance(target, Outside) or _is_allowed(
        policies, target, "ingress", source, port, protocol
    )
    return leaves and enters


def _is_allowed(
    policies: list[Any], pod: Pod, direction: str, peer: Peer, port: int, protocol: str
) -> bool:
    """Return whether a pod may connect in a direction: any policy that selects it restricts it."""
    selecting = [
        each["spec"]
        for each in policies
        if each["metadata"]["namespace"] == pod.namespace
        and direction.capitalize() in _directions(each["spec"])
        and _matches(each["spec"]["podSelector"], pod.labels)
    ]
    rules = [rule for spec in selecting for rule in spec.get(direction, [])]
    return not selecting or any(
        _names_peer(rule.get({"egress": "to", "ingress": "from"}[direction]), pod, peer)
        and _names_port(rule.get("ports"), port, protocol)
        for rule in rules
    )


def _directions(spec: Any) -> list[str]:
    without = ["Ingress", "Egress"] if "egress" in spec else ["Ingress"]
    return spec.get("policyTypes", without)


def _matches(selector: Any, labels: Mapping[str, str]) -> bool:
    """Return whether labels fulfil all conditions of a selector; an empty one has none."""
    exact = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in exact.items()) and all(
        _fulfils(each, labels) for each in selector.get("matchExpressions", [])
    )


def _fulfils(condition: Any, labels: Mapping[str, str]) -> bool:
    key, values = condition["key"], condition.get("values", [])
    return {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }[condition["operator"]]


def _names_peer(named: list[Any] | None, pod: Pod, peer: Peer) -> bool:
    """Return whether a rule names a peer; a rule without peers names all."""
    return not named or any(_is_peer(each, pod, peer) for each in named)


def _is_peer(named: Any, pod: Pod, peer: Peer) -> bool:
    if isinstance(peer, Outside):
        return "ipBlock" in named and _contains(named["ipBlock"], peer.address)
    if "ipBlock" in named:
        return False
    here = {"matchLabels": {"kubernetes.io/metadata.name": pod.namespace}}
    namespace = {"kubernetes.io/metadata.name": peer.namespace}
    return _matches(named.get("namespaceSelector", here), namespace) and _matches(
        named.get("podSelector", {}), peer.labels
    )


def _contains(block: Any, address: str) -> bool:
    inside = ip_address(address)
    left_out = any(inside in ip_network(each) for each in block.get("except", []))
    return inside in ip_network(block["cidr"]) and not left_out


def _names_port(named: list[Any] | None, port: int, protocol: str) -> bool:
    """Return whether a rule names a port; a rule without ports names all."""
    return not named or any(
        each.get("protocol", "TCP") == protocol
        and each.get("port", port) <= port <= each.get("endPort", each.get("port", port))
        for each in named
    )
