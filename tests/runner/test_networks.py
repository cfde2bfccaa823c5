"""Addresses and networks of a node, and the routes to try."""

import ctypes
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.runner import preflight
from koalapy.runner.networks import find_address, own_networks
from koalapy.runner.plan import Plan
from koalapy.runner.preflight import MAX_COMBINATIONS, MAX_ROUTES, is_well_formed, other_routes
from tests.needs import NAMESPACES
from tests.runner.conftest import DEADLINE, MPI_ENVIRONMENT, FakeAgent, FakeNode, listening_agent
from tests.runner.test_openmpi import run_program

# Routes


def make_plan_of(*nodes: tuple[str, str]) -> Plan:
    """Return a plan of nodes given as (cluster, address), each a separate component."""
    places = [{"host": h, "cluster": c, "token": f"1.1.{i}", "node": 0, "slots": 1} for i, (c, h) in enumerate(nodes)]
    contexts = [{"token": p["token"], "nodes": [i]} for i, p in enumerate(places)]
    return Plan({"nodes": places, "contexts": contexts, "head": "1.1.0"}, "1.1.0", 0)


def test_other_routes_prefer_common_networks() -> None:
    plan = make_plan_of(("north", "10.1.0.1"), ("north", "10.1.0.2"), ("south", "10.2.0.1"))
    choices = {
        0: [("10.1.0.0/24", "10.1.0.1"), ("10.7.0.0/24", "10.7.0.1"), ("10.9.0.0/24", "10.9.0.1")],
        1: [("10.9.0.0/24", "10.9.0.2"), ("10.1.0.0/24", "10.1.0.2")],
        2: [("10.2.0.0/24", "10.2.0.1"), ("10.9.0.0/24", "10.9.0.3")],
    }
    assert other_routes(plan, choices) == [
        (["10.9.0.0/24"], ["10.9.0.1", "10.9.0.2", "10.9.0.3"]),
        (["10.1.0.0/24", "10.9.0.0/24"], ["10.1.0.1", "10.1.0.2", "10.9.0.3"]),
        (["10.2.0.0/24", "10.9.0.0/24"], ["10.9.0.1", "10.9.0.2", "10.2.0.1"]),
    ]


def test_other_routes_keep_configured_network() -> None:
    plan = make_plan_of(("north", "10.1.0.1"), ("south", "10.2.0.1"))
    choices: dict[int, list[tuple[str, str]]] = {0: [], 1: [("10.2.0.0/24", "10.2.0.1"), ("10.9.0.0/24", "10.9.0.3")]}
    assert other_routes(plan, choices) == [(["10.9.0.0/24"], ["10.1.0.1", "10.9.0.3"])]
    assert other_routes(plan, {0: [], 1: []}) == []


def test_other_routes_of_many_networks_are_few_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of another site name as many networks as they like."""

    def few_combinations(*networks: list[str]) -> Iterator[tuple[str, ...]]:
        for number, combination in enumerate(product(*networks)):
            assert number <= MAX_COMBINATIONS
            yield combination

    monkeypatch.setattr(preflight, "product", few_combinations)
    plan = make_plan_of(*((f"cluster-{i}", f"10.1.{i}.1") for i in range(9)))
    own = {i: [(f"10.{i}.{j}.0/24", f"10.{i}.{j}.1") for j in range(20)] for i in range(9)}
    routes = other_routes(plan, {i: [*pairs, ("10.99.0.0/24", f"10.99.0.{i}")] for i, pairs in own.items()})
    assert routes[0] == (["10.99.0.0/24"], [f"10.99.0.{i}" for i in range(9)])
    assert len(routes) == MAX_ROUTES


@pytest.mark.parametrize("host", ["", "-x", "evil.example", "127.1", "../../tmp/x", "a,b", "a b", "a\nb", "x" * 256])
def test_plan_move_rejects_host_names(host: str) -> None:
    plan = make_plan_of(("north", "10.1.0.1"), ("south", "10.2.0.1"))
    plan.move(["10.9.0.1", "fe80::1%eth0"])
    with pytest.raises(ValueError, match="is not an address"):
        plan.move(["10.9.0.3", host])
    assert [node["host"] for node in plan.nodes] == ["10.9.0.1", "fe80::1%eth0"]


READY = {"op": "ready", "port": 7, "word": "w", "name": "n", "series": 5, "choices": [["10.9.0.0/24", "10.9.0.1"]]}
REACHED = {"op": "reached", "failures": [[1, "refused"]]}


@pytest.mark.parametrize(
    ("message", "field", "wrong"),
    [
        (READY, "port", [0, 65536, -1, "7", None, [], 1.5]),
        (READY, "word", [None, 7, []]),
        (READY, "name", [7]),
        (READY, "choices", [None, 7, [7], [["a"]], [["a", 7]], [["a", "../x"]], [[7, "10.9.0.1"]]]),
        (REACHED, "failures", [None, 7, [7], [[2, "x"]], [["1", "x"]], [[1, None]], [[-1, "x"]]]),
    ],
)
def test_is_well_formed_rejects_invalid_messages(message: dict[str, Any], field: str, wrong: list[Any]) -> None:
    assert is_well_formed(message, 2)
    assert not is_well_formed({name: value for name, value in message.items() if name != field}, 2)
    for value in wrong:
        assert not is_well_formed(message | {field: value}, 2), value


networks = st.lists(st.sampled_from("abcdefg"), max_size=6, unique=True)


@given(st.lists(st.tuples(st.sampled_from(["north", "south", "east"]), networks), min_size=1, max_size=5))
def test_other_routes_are_few_distinct_and_valid(nodes: list[tuple[str, list[str]]]) -> None:
    plan = make_plan_of(
        *((cluster, f"{addresses[0] if addresses else 'x'}{i}") for i, (cluster, addresses) in enumerate(nodes))
    )
    routes = other_routes(plan, {i: [(n, f"{n}{i}") for n in addresses] for i, (_, addresses) in enumerate(nodes)})
    assert len(routes) <= MAX_ROUTES
    hosts = [route[1] for route in routes]
    assert len({tuple(address) for address in hosts}) == len(hosts)
    assert [node["host"] for node in plan.nodes] not in hosts
    for address in hosts:
        for place, (_, addresses) in enumerate(nodes):
            assert address[place] in ({f"{n}{place}" for n in addresses} or {f"x{place}"}) | {plan.nodes[place]["host"]}


# Real networks: each node in a separate network namespace


CLONE_NEWNET = 0x40000000


def run_ip(*arguments: object) -> None:
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, timeout=DEADLINE)


def enter_namespace(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def isolated_network() -> Iterator[None]:
    """Run this process and its children in a new network namespace."""
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        yield
    finally:
        enter_namespace(namespace)
        os.close(namespace)


class Machines:
    """Machines as network namespaces, on bridges of this process; each bridge is a network."""

    def __init__(self) -> None:
        self._made: list[subprocess.Popen[bytes]] = []
        self._bridges: set[int] = set()
        run_ip("link", "set", "lo", "up")

    def new(self, *addresses: tuple[int, int]) -> int:
        """Create a machine with addresses 10.NETWORK.0.HOST; return the process by which it is entered."""
        machine = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep 300"], stdout=subprocess.PIPE)
        self._made.append(machine)
        assert machine.stdout is not None
        machine.stdout.readline()  # now it is in its namespace
        self._inside(machine.pid, "link", "set", "lo", "up")
        for place, (network, host) in enumerate(addresses):
            self._bridge(network)
            port, device = self.port(network, host), f"eth{place}"
            run_ip("link", "add", port, "type", "veth", "peer", "name", device, "netns", machine.pid)
            run_ip("link", "set", port, "master", f"net{network}", "up")
            self._inside(machine.pid, "addr", "add", f"10.{network}.0.{host}/24", "dev", device)
            self._inside(machine.pid, "link", "set", device, "up")
        return machine.pid

    @staticmethod
    def port(network: int, host: int) -> str:
        return f"p{network}-{host}"

    def _inside(self, machine: int, *arguments: str) -> None:
        command = ["nsenter", "-t", str(machine), "-n", "ip", *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE)

    def _bridge(self, network: int) -> None:
        if network not in self._bridges:
            self._bridges.add(network)
            run_ip("link", "add", f"net{network}", "type", "bridge")
            run_ip("addr", "add", f"10.{network}.0.254/24", "dev", f"net{network}")
            run_ip("link", "set", f"net{network}", "up")

    def close(self) -> None:
        for machine in self._made:
            machine.kill()
            machine.communicate()


@pytest.fixture
def machines() -> Iterator[Machines]:
    try:
        with isolated_network():
            network_machines = Machines()
            try:
                network_machines.new((99, 1))
                yield network_machines
            finally:
                network_machines.close()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{NAMESPACES.reason}: {error}")


@pytest.fixture
async def agent(machines: Machines, tmp_path: Path) -> AsyncIterator[FakeAgent]:
    async with listening_agent(tmp_path, "0.0.0.0") as fake:
        yield fake


async def start_node(
    agent: FakeAgent, machines: Machines, token: str, index: int, *addresses: tuple[int, int]
) -> FakeNode:
    """Start a node that reaches its agent by its first address."""
    network, host = addresses[0]
    assert agent.server is not None
    port = agent.server.sockets[0].getsockname()[1]
    file = agent.directory / f"agent-{network}.json"
    file.write_text(json.dumps({"host": f"10.{network}.0.254", "port": port}))
    machine = machines.new(*addresses)
    settings: dict[str, Any] = {name: v for name, v in MPI_ENVIRONMENT.items() if name != "OMPI_MCA_btl_tcp_if_include"}
    settings |= {"KOALA_AGENT_FILE": str(file), "KOALA_NODE_INDEX": str(index), "KOALA_NODE": f"node-{network}-{host}"}
    prefix = ["nsenter", "-t", str(machine), "-n"]
    return await agent.start(token, index, f"10.{network}.0.{host}", prefix, **settings)


@pytest.mark.processes
@pytest.mark.usefixtures("machines")
def test_each_address_of_an_interface_has_its_own_network() -> None:
    """No address of the first interface has a label without a suffix."""
    run_ip("addr", "add", "10.1.2.3/20", "dev", "net99", "label", "net99:a")
    run_ip("addr", "add", "10.4.0.7/16", "dev", "net99", "label", "net99:b")
    run_ip("addr", "del", "10.99.0.254/24", "dev", "net99")
    assert own_networks() == [("10.1.0.0/20", "10.1.2.3"), ("10.4.0.0/16", "10.4.0.7")]


WHERE = ["sh", "-c", "echo $OMPI_COMM_WORLD_RANK $KOALA_HOST $KOALA_HOSTS $OMPI_MCA_btl_tcp_if_include"]


@pytest.mark.processes
@pytest.mark.mpi
async def test_preflight_finds_common_network(agent: FakeAgent, machines: Machines) -> None:
    nodes = [
        await start_node(agent, machines, "7.1.0", 0, (1, 11), (9, 11)),
        await start_node(agent, machines, "7.1.0", 1, (1, 12), (9, 12)),
        await start_node(agent, machines, "7.1.1", 0, (2, 21), (9, 21)),
    ]
    await run_program(agent, nodes, WHERE)
    end = await nodes[0].expect("exit")
    assert (end["code"], end["error"]) == (0, ""), nodes[0].output
    hosts = ["10.9.0.11", "10.9.0.12", "10.9.0.21"]
    assert sorted(nodes[0].output.decode().splitlines()) == [
        f"{rank} {host} {','.join(hosts)} eth1" for rank, host in enumerate(hosts)
    ]
    assert all(job_node.said("running") for job_node in nodes)
    for job_node in nodes:
        assert await job_node.ended() == 0


@pytest.mark.processes
async def test_preflight_without_network_names_addresses(agent: FakeAgent, machines: Machines) -> None:
    nodes = [
        await start_node(agent, machines, "7.1.0", 0, (1, 11), (9, 11)),
        await start_node(agent, machines, "7.1.1", 0, (2, 21), (9, 21)),
    ]
    run_ip("link", "set", machines.port(9, 21), "down")
    await run_program(agent, nodes, WHERE)
    end = await nodes[1].expect("exit")
    assert end["infrastructure"]
    assert "node node-1-11 cannot reach node node-2-21 at 10.2.0.21:" in end["error"]
    assert "; tried too: 10.9.0.0/24" in end["error"]
    assert not any(job_node.said("running") for job_node in nodes)


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
def test_address_in_network_is_found(network: str, found: str | None) -> None:
    assert find_address(network, HERE) == found


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
async def test_node_outside_configured_network_fails(
    agent: FakeAgent, environment: dict[str, str], has: str, network: str, what: str
) -> None:
    profile = {"KOALA_MPI_INTERFACE": network, "KOALA_CLUSTER": "south"}
    node = await agent.start("7.1.0", 0, "127.0.4.1", **environment, **profile)
    end = await node.expect("exit")
    assert await node.ended() == 0
    assert (end["code"], end["infrastructure"]) == (None, True)
    assert f"{node.hellos[0]['name']} has no {what} (it has {has}" in end["error"]
    assert end["error"].endswith(": correct clusters.south.mpi.interface")
