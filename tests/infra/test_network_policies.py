"""The evaluator of NetworkPolicies that other tests use, on rules that a reader can follow."""

from typing import Any

import pytest

from tests.helpers.kubernetes.network_policies import Outside, Peer, Pod, can_connect

DATABASE = Pod("shop", {"role": "db"})
SHOP = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shop"}}}
FRONT = {"podSelector": {"matchLabels": {"role": "front"}}}
BLOCK = {"ipBlock": {"cidr": "172.17.0.0/16", "except": ["172.17.1.0/24"]}}


def policy(peers: list[Any], ports: list[Any] | None = None) -> list[Any]:
    """One policy, by which only `peers` reach the database."""
    rule = {"from": peers, "ports": ports or []}
    spec = {"podSelector": {"matchLabels": {"role": "db"}}, "ingress": [rule]}
    return [{"metadata": {"namespace": "shop"}, "spec": spec}]


@pytest.mark.parametrize(
    ("peers", "source", "expected"),
    [
        # Two conditions of one peer: both must hold.
        ([SHOP | FRONT], Pod("shop", {"role": "front"}), True),
        ([SHOP | FRONT], Pod("shop", {"role": "back"}), False),
        ([SHOP | FRONT], Pod("other", {"role": "front"}), False),
        # Two peers: one is enough. A peer without a namespace is in that of the policy.
        ([SHOP, FRONT], Pod("shop", {"role": "back"}), True),
        ([SHOP, FRONT], Pod("other", {"role": "front"}), False),
        ([FRONT], Pod("shop", {"role": "front"}), True),
        # An empty selector selects all; no peers are all peers.
        ([{"namespaceSelector": {}}], Pod("other"), True),
        ([], Outside("8.8.8.8"), True),
        ([BLOCK], Outside("172.17.2.1"), True),
        ([BLOCK], Outside("172.17.1.1"), False),
        ([BLOCK], Outside("172.18.0.1"), False),
        ([SHOP], Outside("172.17.2.1"), False),
    ],
)
def test_who_reaches_a_pod_that_a_policy_selects(peers: list[Any], source: Peer, expected: bool):
    assert can_connect(policy(peers), source, DATABASE, 5432) is expected


def test_a_policy_restricts_the_pods_and_the_direction_that_it_names_only():
    assert can_connect(policy([FRONT]), Pod("other"), Pod("shop", {"role": "front"}), 80)
    assert can_connect(policy([FRONT]), DATABASE, Pod("other"), 80)
    assert can_connect(policy([FRONT]), Pod("other"), Pod("other", {"role": "db"}), 80)


@pytest.mark.parametrize(
    ("port", "protocol", "expected"),
    [(5432, "TCP", True), (5432, "UDP", False), (22, "TCP", False), (32005, "TCP", True)],
)
def test_ports_are_numbers_or_ranges_of_a_protocol(port: int, protocol: str, expected: bool):
    ports = [{"port": 5432}, {"port": 32000, "endPort": 32010}]
    assert can_connect(policy([], ports), Pod("other"), DATABASE, port, protocol) is expected


def test_policies_add_up():
    both = policy([FRONT], [{"port": 80}]) + policy([SHOP], [{"port": 443}])
    back, front = Pod("shop", {"role": "back"}), Pod("shop", {"role": "front"})
    assert can_connect(both, front, DATABASE, 80)
    assert can_connect(both, back, DATABASE, 443)
    assert not can_connect(both, back, DATABASE, 80)
