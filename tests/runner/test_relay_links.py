"""Which clusters a job joins by relayed links, and how."""

from typing import Any

import pytest

from koalapy.runner.parameters import localize_parameters
from koalapy.runner.plan import Plan
from koalapy.runner.relay_links import (
    RelayedLinks,
    RelayOffer,
    check_networks,
    decide_links,
    node_ports,
    overlap,
    read_links,
)
from koalapy.runner.settings import Failure

NORTH = [("10.1.0.11", [("10.1.0.0/24", "10.1.0.11")]), ("10.1.0.12", [("10.1.0.0/24", "10.1.0.12")])]
SOUTH = [("10.2.0.11", [("172.16.0.0/16", "172.16.0.2"), ("10.2.0.0/24", "10.2.0.11")])]
EAST = [("192.0.2.9", [("192.0.2.0/24", "192.0.2.9")])]
NORTH_SOUTH = ("north", "south")


def make_offer(*pairs: tuple[str, str, str]) -> RelayOffer:
    return RelayOffer({"attempt": "7.1", "pairs": pairs, "bases": [21_000, 22_000]}, [1, 1, 1])


def test_offer_of_the_daemon_names_pairs_and_ports() -> None:
    offer = make_offer(("south", "north", "any"), ("east", "north", "relayed"))
    assert offer.pairs == {NORTH_SOUTH: "any", ("east", "north"): "relayed"}
    assert offer.required == {("east", "north")}
    assert offer.layouts == [node_ports(21_000, [1, 1, 1]), node_ports(22_000, [1, 1, 1])]


def test_links_of_different_networks_leave_traffic_within_clusters_native() -> None:
    links = decide_links(make_offer(("north", "south", "any")), [NORTH_SOUTH], 0, 5, {"north": NORTH, "south": SOUTH})
    assert not links.on_loopback
    assert links.joins("south", "north")
    assert not links.joins("north", "north")
    assert links.reachable_networks("north") == ["10.1.0.0/24"]


def test_links_reach_the_networks_of_clusters_without_relays_between() -> None:
    hosts = {"north": NORTH, "south": SOUTH, "east": EAST}
    links = decide_links(make_offer(("north", "south", "any")), [NORTH_SOUTH], 0, 5, hosts)
    assert links.reachable_networks("north") == ["10.1.0.0/24", "192.0.2.0/24"]
    assert links.reachable_networks("east") == ["10.1.0.0/24", "10.2.0.0/24", "192.0.2.0/24"]
    assert links.has_relay("south")
    assert not links.has_relay("east")


@pytest.mark.parametrize(
    ("series", "south"),
    [
        (4, SOUTH),
        (5, NORTH),
        (5, [("10.1.1.1", [("10.1.0.0/16", "10.1.1.1")])]),
        (5, [("10.2.0.11", [("10.2.0.11/32", "10.2.0.11")])]),
        (5, [("node.south", [("10.2.0.0/24", "10.2.0.11")])]),
    ],
    ids=["series 4", "equal", "overlapping", "single address", "name"],
)
def test_links_use_loopback_only_where_interfaces_are_ambiguous(series: int, south: Any) -> None:
    hosts = {"north": NORTH, "south": south}
    links = decide_links(make_offer(("north", "south", "any")), [NORTH_SOUTH], 1, series, hosts)
    assert links.on_loopback
    assert links.joins("north", "north")


@pytest.mark.parametrize(
    ("series", "south", "cause"),
    [
        (4, SOUTH, "Open MPI 4"),
        (5, NORTH, "networks with the same addresses"),
        (5, [("node.south", [("10.2.0.0/24", "10.2.0.11")])], "nodes of south without a known network"),
    ],
)
def test_links_on_loopback_only_need_all_pairs_of_clusters(series: int, south: Any, cause: str) -> None:
    hosts = {"north": NORTH, "south": south, "east": EAST}
    with pytest.raises(Failure, match=f"{cause} sends all data by relays .* clusters east and north may not use"):
        decide_links(make_offer(("north", "south", "any")), [NORTH_SOUTH], 0, series, hosts)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("10.0.0.0/8", "10.1.0.0/24", True),
        ("10.1.0.0/24", "10.0.0.0/8", True),
        ("10.1.0.0/24", "10.1.1.0/24", False),
        ("0.0.0.0/0", "10.1.1.0/24", True),
    ],
)
def test_overlap_of_networks(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) is expected


def test_links_survive_the_message_to_other_nodes() -> None:
    offer = make_offer(("north", "south", "any"))
    links = decide_links(offer, [NORTH_SOUTH], 1, 5, {"north": NORTH, "south": SOUTH})
    copy = read_links(links.to_message(), offer)
    assert vars(copy) == vars(links)


@pytest.mark.parametrize(
    "change",
    [
        {"pairs": [["east", "north"]]},
        {"pairs": [["east"]]},
        {"layout": 2},
        {"layout": -1},
        {"networks": {"north": ["10.1.0.0/24;0.0.0.0/1"]}},
        {"networks": {"north": ["10.1.0.1/32"]}},
        {"networks": {"north": [7]}},
        {"networks": {"north": ["10.1.0.0/24"], "south": ["10.2.0.0/24"] * 5000}},
        {"networks": {"north": ["10.1.0.0/24"]}},
        {"networks": {"north": ["10.1.0.0/24"], "south": ["10.1.0.0/16"]}},
        {"networks": {"north": ["10.1.0.0/24"], "south": ["10.2.0.0/24"], "x": ["10.0.0.0/8"]}},
    ],
    ids=lambda change: str(change)[:80],
)
def test_links_that_a_hostile_head_node_decides_are_rejected(change: dict[str, Any]) -> None:
    offer = make_offer(("north", "south", "any"))
    message = decide_links(offer, [NORTH_SOUTH], 0, 5, {"north": NORTH, "south": SOUTH}).to_message()
    with pytest.raises(ValueError, match=r"head node|unpack"):
        read_links({**message, **change}, offer)
    with pytest.raises(ValueError, match="may not use"):
        read_links(message, None)


def make_plan(node: int, how: str = "any") -> Plan:
    nodes = [
        {"host": host, "cluster": cluster, "token": cluster, "node": 0, "slots": 1}
        for host, cluster in (("10.1.0.11", "north"), ("10.2.0.11", "south"))
    ]
    contexts = [
        {"token": name, "command": ["true"], "environment": {}, "nodes": [i]} for i, name in enumerate(NORTH_SOUTH)
    ]
    relay = {"attempt": "7.1", "pairs": [["north", "south", how]], "bases": [21_000]}
    message = {"nodes": nodes, "contexts": contexts, "head": "north", "job": 7, "generation": 1, "relay": relay}
    return Plan(message, NORTH_SOUTH[node], 0)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("prte_hnp_uri", "prterun-a@0.0;tcp://10.1.0.11:21000:24", "prterun-a@0.0;tcp://10.2.0.11:21000:24"),
        ("orte_hnp_uri", "7.0;tcp://10.1.0.11,10.9.0.1:21000", "7.0;tcp://10.2.0.11:21000"),
        ("ess_base_vpid", "1", "1"),
    ],
)
def test_daemon_behind_a_relay_connects_to_its_own_node(name: str, value: str, expected: str) -> None:
    plan = make_plan(1)
    assert localize_parameters({name: value}, plan) == {name: value}
    plan.relayed = RelayedLinks([NORTH_SOUTH], 0, {}, on_loopback=False)
    assert localize_parameters({name: value}, plan) == {name: expected}


def test_nodes_with_equal_addresses_get_unique_names() -> None:
    plan = make_plan(0)
    assert plan.names == ["10.1.0.11", "10.2.0.11"]
    plan.move(["10.1.0.11", "10.1.0.11"])
    assert plan.names == ["koala-node-0", "koala-node-1"]
    assert "koala-node-0:1,koala-node-1:1" in plan.mpirun_contexts()


@pytest.mark.parametrize(
    ("how", "pairs", "is_refused"),
    [("any", None, False), ("relayed", None, True), ("relayed", [], True), ("relayed", [NORTH_SOUTH], False)],
)
def test_plan_requires_the_relays_of_its_cluster(how: str, pairs: list[Any] | None, is_refused: bool) -> None:
    plan = make_plan(1, how)
    plan.relayed = None if pairs is None else RelayedLinks(pairs, 0, {}, on_loopback=False)
    if is_refused:
        with pytest.raises(Failure, match="north and south must use relayed links"):
            plan.require_relays()
    else:
        plan.require_relays()


@pytest.mark.parametrize(
    ("networks", "is_right"),
    [
        ({"north": ["10.1.0.0/24"], "south": ["10.2.0.0/24"]}, True),
        ({"north": ["10.9.0.0/24"], "south": ["10.2.0.0/24"]}, False),
        ({"north": ["10.1.0.0/24"]}, False),
        ({"north": ["10.1.0.0/24"], "south": ["10.2.0.0/24"], "x": ["10.3.0.0/24"]}, False),
    ],
)
def test_node_checks_the_networks_that_another_site_names(networks: dict[str, list[str]], is_right: bool) -> None:
    links = RelayedLinks([NORTH_SOUTH], 0, networks, on_loopback=False)
    if is_right:
        check_networks(links, "north", {"north", "south"}, "10.1.0.0/24")
    else:
        with pytest.raises(ValueError, match="head node"):
            check_networks(links, "north", {"north", "south"}, "10.1.0.0/24")
