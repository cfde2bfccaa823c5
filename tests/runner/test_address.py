"""Which address a node has in a network."""

import pytest

from koalapy.runner.networks import address_in, is_inside, own_addresses
from tests.runner.conftest import FakeAgent

HERE = [("lo", "127.0.0.1"), ("eth0", "192.0.2.7"), ("ib0", "10.1.0.7"), ("ib0", "10.2.0.7")]


@pytest.mark.parametrize(
    ("network", "found"),
    [
        ("10.0.0.0/8", "10.1.0.7"),
        ("10.2.0.0/16", "10.2.0.7"),
        ("10.2.0.7/32", "10.2.0.7"),
        ("0.0.0.0/0", "127.0.0.1"),
        ("eth0", "192.0.2.7"),
        ("ib0", "10.1.0.7"),
        ("ib1,eth0", "192.0.2.7"),
        ("eth", None),
        ("198.18.0.0/24", None),
        ("fd00::/64", None),
    ],
)
def test_the_address_in_a_network(network: str, found: str | None) -> None:
    assert address_in(network, HERE) == found


def test_a_network_ends_where_its_length_says() -> None:
    assert is_inside("10.1.1.255", "10.1.0.0/23")
    assert not is_inside("10.1.2.0", "10.1.0.0/23")


def test_this_machines_own_addresses() -> None:
    assert ("lo", "127.0.0.1") in own_addresses()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("environment", "host", "name"),
    [
        ({"SLURM_NODEID": "0", "SLURMD_NODENAME": "n17"}, "127.0.0.1", "n17"),
        ({"KOALA_NODE_INDEX": "0", "KOALA_NODE": "sge3"}, "127.0.0.1", "sge3"),
        ({"KOALA_NODE_INDEX": "0", "KOALA_NODE": "sge3", "KOALA_MPI_INTERFACE": "127.0.0.0/8"}, "127.0.0.1", "sge3"),
        ({"KOALA_MPI_INTERFACE": "127.0.4.0/24"}, "127.0.4.1", "node-127.0.4.1"),
    ],
)
async def test_runner_reports_its_address(agent: FakeAgent, environment: dict[str, str], host: str, name: str) -> None:
    node = await agent.start("7.1.0", 0, "127.0.4.1", **environment)
    assert (node.hellos[0]["host"], node.hellos[0]["name"], node.hellos[0]["phase"]) == (host, name, "waiting")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("environment", "has"),
    [({"KOALA_NODE_INDEX": "0", "KOALA_NODE": "n1"}, "127.0.0.1 on lo"), ({}, "127.0.4.1 on lo")],
)
@pytest.mark.parametrize(
    ("network", "what"), [("203.0.113.0/24", "address in 203.0.113.0/24"), ("ib7", "interface ib7 with an address")]
)
async def test_a_node_outside_its_clusters_network_says_so_and_ends(
    agent: FakeAgent, environment: dict[str, str], has: str, network: str, what: str
) -> None:
    profile = {"KOALA_MPI_INTERFACE": network, "KOALA_CLUSTER": "south"}
    node = await agent.start("7.1.0", 0, "127.0.4.1", **environment, **profile)
    end = await node.expect("exit")
    assert await node.ended() == 0
    assert (end["code"], end["infrastructure"]) == (None, True)
    assert f"{node.hellos[0]['name']} has no {what} (it has {has}" in end["error"]
    assert end["error"].endswith(": correct clusters.south.mpi.interface")
