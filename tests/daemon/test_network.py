"""Measurements of links by jobs, with simulated agents."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koalapy.daemon.engine.engine import WorkItem
from koalapy.daemon.network.links import LinkState, LinkTable
from koalapy.daemon.network.network import Network, measurement_spec
from koalapy.model.cluster import ClusterPair, Link
from koalapy.model.job import ComponentState, JobState
from koalapy.model.measurement import Measurement, MeasurementKind, MeasurementSettings
from koalapy.model.reports import ComponentStatus, Inventory
from koalapy.model.users import Accounts, Domain, Users
from koalapy.protocol import messages as wire
from koalapy.runner.preflight import CANNOT_REACH
from koalapy.scheduler.events import ClusterDrained
from koalapy.store.service_tables import MeasurementStore
from tests import signals
from tests.daemon.test_hub import DEADLINE, Agent, Daemon, report_nodes, running_daemon, wait_for_state
from tests.identities import DIRECTOR

NORTH, BOTH, SOUTH = ("north", "north"), ("north", "south"), ("south", "south")
RESULT = json.dumps({"program": "pingpong", "pairs": [{"latency": 0.25, "bandwidth": 2e6}]})
UNREACHED = f"node s {CANNOT_REACH} n at 10.0.0.1:4711 (timed out)"

Act = Callable[[str, bool], tuple[str, dict[str, Any]]]
"""Return the output and the end of a component, from its token and whether it leads."""


def succeed(_token: str, leads: bool) -> tuple[str, dict[str, Any]]:
    return (f"rank 0 is here\n{RESULT}\n", {"program_exit": 0}) if leads else ("", {})


def fail_to_reach(_token: str, leads: bool) -> tuple[str, dict[str, Any]]:
    return "", {"error": UNREACHED, "infrastructure": True} if not leads else {}


def fail_to_import(_token: str, leads: bool) -> tuple[str, dict[str, Any]]:
    return ("No module named numpy\n", {"program_exit": 1}) if leads else ("", {})


def print_nothing(_token: str, leads: bool) -> tuple[str, dict[str, Any]]:
    return ("hello\n", {"program_exit": 0}) if leads else ("", {})


def print_absurd(_token: str, leads: bool) -> tuple[str, dict[str, Any]]:
    output = '{"pairs": [{"latency": 0.1, "bandwidth": 5e-324}]}\n{"pairs": [{"latency": 1, "bandwidth": 1e308}]}\n'
    return (output, {"program_exit": 0}) if leads else ("", {})


class Site:
    """A cluster that gives nodes to every component and runs ``act`` as its program."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.act: Act = succeed
        self.deaf = False
        """Set while components get no nodes."""
        self.claimed: set[str] = set()
        self.most = 0
        """Highest number of components with nodes at the same time."""
        self._done = 0

    async def live_components(self) -> None:
        while True:
            for message in self.agent.heard[self._done :]:
                if self.deaf and message["type"] == "submit":
                    break
                self._done += 1
                self._handle_message(message)
            await signals.until(self._has_more, timeout_s=float("inf"))

    def _has_more(self) -> bool:
        """Return whether messages wait to be processed. A deaf site does not process a submit."""
        unread = self.agent.heard[self._done :]
        return bool(unread) and not (self.deaf and unread[0]["type"] == "submit")

    def _handle_message(self, message: dict[str, Any]) -> None:
        kind, token = message["type"], message.get("token", "")
        if kind in ("submit", "open", "stop"):
            self.agent.say_to_daemon(wire.Ack(id=message["id"]))
        if kind == "submit":
            self.claimed.add(token)
            self.most = max(self.most, len(self.claimed))
            hosts = [f"10.0.{len(self.claimed)}.{i}" for i in range(message["size"])]
            self.agent.say_to_daemon(ComponentStatus(token=token, state=ComponentState.CLAIMED, hosts=tuple(hosts)))
        elif kind == "open":
            self.agent.say_to_daemon(ComponentStatus(token=token, state=ComponentState.RUNNING, hosts=()))
            printed, end = self.act(token, message["head"] == token)
            if printed:
                data = base64.b64encode(printed.encode()).decode()
                self.agent.say_to_daemon(wire.Output(token=token, offset=0, data=data))
            self._end_component(token, **end)
        elif kind == "stop":
            self._end_component(token)

    def _end_component(self, token: str, **how: Any) -> None:
        self.claimed.discard(token)
        self.agent.say_to_daemon(
            ComponentStatus(token=token, state=ComponentState.ENDED, hosts=(), **how), report_nodes(2)
        )


async def wait_for(look: Callable[[], object]) -> None:
    """Wait until the condition is true."""
    await signals.until(lambda: look())


class World:
    """A daemon with two clusters of two nodes, and its network measurements."""

    def __init__(self, daemon: Daemon, north: Site, south: Site, path: Path) -> None:
        self.daemon = daemon
        self.sites = {"north": north, "south": south}
        self.store = MeasurementStore(daemon.store.database)
        self.jobs = daemon.jobs
        self.network = self.new_network()

    def new_network(self, configured: dict[ClusterPair, Link] | None = None, **how: Any) -> Network:
        book = LinkTable(("north", "south"), configured or {}, self.store.latest())
        return Network(self.daemon.engine, self.jobs, self.store, book, MeasurementSettings(**how))

    async def wait_until_measured(self, network: Network | None = None) -> dict[ClusterPair, Any]:
        """Wait until no measurement is under way; return all links by pair."""
        network = network or self.network
        await wait_for(lambda: not any(link.under_way for link in network.list_links()))
        await self.daemon.engine.commit(WorkItem())
        return {link.pair: link for link in network.list_links()}

    def link_between(self, pair: ClusterPair) -> Link:
        """Return the link as the scheduler sees it."""
        return self.daemon.scheduler.queries.grid.link(*pair)

    async def wait_for_job(self, ident: int, *states: JobState) -> None:
        def look() -> bool:
            job = self.daemon.scheduler.queries.job(ident) or self.daemon.store.job(ident)
            return job is not None and job.state in states

        await wait_for(look)


@asynccontextmanager
async def world_of(path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running_daemon(path))
        sites, lives = [], []
        for name in ("north", "south"):
            agent = await stack.enter_async_context(daemon.agent_of(name))
            agent.say_to_daemon(Inventory(components=()), report_nodes(2))
            await wait_for_state(daemon, name, ("usable", 2, ""))
            sites.append(Site(agent))
            lives.append(asyncio.create_task(sites[-1].live_components()))
        world = World(daemon, sites[0], sites[1], path)
        yield world
        await world.network.stop()
        for life in lives:
            life.cancel()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_of(tmp_path / "koala.db") as world:
        yield world


async def test_measure_links_runs_one_job_at_a_time(world: World) -> None:
    replies = world.network.measure_links()
    assert [(reply.pair, reply.reason) for reply in replies] == [(NORTH, ""), (BOTH, ""), (SOUTH, "")]
    assert world.network.measure_links([*BOTH]) == replies, "what is under way is not begun again"
    links = await world.wait_until_measured()
    assert {pair: (link.state, link.link) for pair, link in links.items()} == dict.fromkeys(
        (NORTH, BOTH, SOUTH), (LinkState.MEASURED, Link(0.25, 2e6))
    )
    assert [world.link_between(pair) for pair in (NORTH, BOTH, SOUTH)] == [Link(0.25, 2e6)] * 3
    specs = [(await world.jobs.get(ident)).job.spec for ident in (1, 2, 3)]
    assert [spec.name for spec in specs] == ["network north-north", "network north-south", "network south-south"]
    assert {(spec.owner, spec.priority, spec.processes_per_node) for spec in specs} == {("koala", "low", 1)}
    assert world.daemon.scheduler.queries.jobs() == []
    assert [site.most for site in world.sites.values()] == [1, 1]
    (line,) = await world.network.read_history("south", "north", 10)
    assert (line.kind, line.job, line.latency, line.bandwidth) == (MeasurementKind.PINGPONG, 2, 0.25, 2e6)
    assert world.store.latest() == [links[pair].measurements.measured for pair in (NORTH, BOTH, SOUTH)]


async def test_measure_links_at_start_waits_for_agents(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running_daemon(tmp_path / "koala.db"))
        world = World(daemon, Site(None), Site(None), tmp_path / "koala.db")
        world.network.start()
        chance = asyncio.create_task(world.network.wait_for_agents())
        for name in ("north", "south"):
            assert not chance.done()
            agent = await stack.enter_async_context(daemon.agent_of(name))
            agent.say_to_daemon(Inventory(components=()), report_nodes(2))
            await wait_for_state(daemon, name, ("usable", 2, ""))
        async with asyncio.timeout(DEADLINE):
            await chance
        assert [reply.reason for reply in world.network.measure_links()] == ["", "", ""]
        await world.network.stop()


async def test_measure_links_stops_waiting_for_absent_agents(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        world = World(daemon, Site(None), Site(None), tmp_path / "koala.db")
        world.network.start()
        async with asyncio.timeout(DEADLINE):
            await world.network.wait_for_agents()
        assert "has not connected yet" in world.network.measure_links()[0].reason


async def test_measure_links_with_parallel_setting_runs_several(world: World) -> None:
    network = world.new_network(parallel=2)
    for site in world.sites.values():
        site.deaf = True
    network.measure_links(pairs=[NORTH, SOUTH, BOTH])
    await wait_for(lambda: [link.under_way and link.under_way.job for link in network.list_links()] == [1, None, 2])
    for site in world.sites.values():
        site.deaf = False
    assert {link.state for link in (await world.wait_until_measured(network)).values()} == {LinkState.MEASURED}


async def test_link_with_unreachable_nodes_is_unreachable_until_measured(world: World) -> None:
    network = world.new_network({BOTH: Link(0.1, 5e6)})
    world.daemon.scheduler.queries.grid.set_link(*BOTH, Link(0.1, 5e6))
    for site in world.sites.values():
        site.act = fail_to_reach
    network.measure_links(pairs=[("south", "north")])
    link = (await world.wait_until_measured(network))[BOTH]
    assert (link.state, link.link, link.measurements.error) == (
        LinkState.UNREACHABLE,
        Link(unreachable=True),
        UNREACHED,
    )
    assert world.link_between(BOTH) == Link(unreachable=True), "what was configured is not so"
    assert (await world.jobs.get(1)).job.restarts == 0
    assert world.new_network({BOTH: Link(0.1)}).list_links()[1].state is LinkState.UNREACHABLE, "after a restart, too"
    for site in world.sites.values():
        site.act = succeed
    network.measure_links(pairs=[BOTH])
    assert (await world.wait_until_measured(network))[BOTH].state is LinkState.MEASURED
    assert world.link_between(BOTH) == Link(0.25, 2e6)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (fail_to_import, "No module named numpy"),
        (print_nothing, "printed no result"),
        (print_absurd, "printed no result"),
    ],
)
async def test_measurement_without_result_is_inconclusive(world: World, act: Act, reason: str) -> None:
    network = world.new_network({BOTH: Link(0.1, 5e6)})
    world.sites["north"].act = act
    network.measure_links(pairs=[BOTH])
    link = (await world.wait_until_measured(network))[BOTH]
    assert (link.state, link.link) == (LinkState.CONFIGURED, Link(0.1, 5e6))
    assert reason in link.measurements.error
    assert [line.kind for line in await network.read_history(*BOTH, 5)] == [MeasurementKind.INCONCLUSIVE]


async def test_measurement_without_nodes_is_cancelled_with_reason(world: World) -> None:
    network = world.new_network(patience=0.05)
    world.sites["south"].deaf = True
    network.measure_links(pairs=[BOTH])
    await world.wait_for_job(1, JobState.CLAIMING)
    await wait_for(lambda: network.list_links()[1].measurements.inconclusive)
    assert network.list_links()[1].measurements.error.startswith("no nodes for 0.05 s: ")
    world.sites["south"].deaf = False
    await world.wait_for_job(1, JobState.CANCELLED)


async def test_measure_links_rejects_unused_and_single_node_clusters(world: World) -> None:
    world.sites["south"].agent.say_to_daemon(report_nodes(1))
    await wait_for_state(world.daemon, "south", ("usable", 1, ""))
    await world.daemon.engine.commit(WorkItem(events=(ClusterDrained("north", "ops", "new switches"),)))
    reasons = {reply.pair: reply.reason for reply in world.network.measure_links()}
    drained = "north is drained: by ops: new switches"
    within = "south has 1 node; measuring within a cluster needs 2"
    assert reasons == {NORTH: drained, BOTH: drained, SOUTH: within}
    assert world.daemon.scheduler.queries.jobs() == []


async def test_measurements_are_resumed_after_restart(world: World) -> None:
    world.sites["south"].deaf = True
    world.network.measure_links(pairs=[BOTH])
    await world.wait_for_job(1, JobState.CLAIMING)
    await world.network.stop()
    twice = await world.jobs.submit((await world.jobs.get(1)).job.spec, DIRECTOR)
    another = world.new_network()
    another.start()
    assert [reply.job for reply in another.measure_links(pairs=[BOTH])] == [1], "it is under way"
    await wait_for(lambda: not (job := world.daemon.scheduler.queries.job(twice[0].job.id)) or job.ending)
    world.sites["south"].deaf = False
    await world.wait_for_job(twice[0].job.id, JobState.CANCELLED)
    assert (await world.wait_until_measured(another))[BOTH].link == Link(0.25, 2e6)
    assert [line.job for line in await another.read_history(*BOTH, 5)] == [1]


async def test_measurement_job_is_not_recognized_by_name_alone(world: World) -> None:
    spec = replace(measurement_spec(BOTH, ("python", "-m", "mine")), owner="koala")
    world.sites["south"].deaf = True
    await world.jobs.submit(spec, DIRECTOR)
    world.network.start()
    assert not any(link.under_way for link in world.network.list_links())
    world.sites["south"].deaf = False
    await world.wait_for_job(1, JobState.SUCCEEDED)
    assert world.store.latest() == []


async def test_measurement_of_user_cluster_runs_as_its_owner(world: World) -> None:
    adas_domain, bobs_domain = Domain("own", "ada"), Domain("own", "bob")
    queries = world.daemon.engine.queries
    queries.accounts = Accounts(Users({}), {"north": adas_domain, "south": adas_domain})
    (reply,) = world.network.measure_links(pairs=[BOTH])
    assert reply.reason == ""
    assert (await world.wait_until_measured(world.network))[BOTH].link == Link(0.25, 2e6)
    assert (await world.jobs.get(1)).job.spec.owner == "ada"
    queries.accounts = Accounts(Users({}), {"north": adas_domain, "south": bobs_domain})
    assert [reply.reason for reply in world.network.measure_links(pairs=[BOTH])] == ["north is ada's own"]
    queries.accounts = Accounts(Users({}), {"north": adas_domain, "south": Domain("mapped")})
    assert [reply.reason for reply in world.network.measure_links(pairs=[BOTH])] == ["ada has no account on south"]
    queries.accounts = Accounts(Users({}), {"north": Domain("mapped")})
    assert [reply.reason for reply in world.network.measure_links(pairs=[BOTH])] == ["koala has no account on north"]


async def test_measure_due_links_requests_due_links_only(world: World) -> None:
    await world.network.measure_due_links()
    assert not any(link.under_way for link in world.network.list_links()), "there is no interval"
    now = world.daemon.engine.clock()
    for pair, age in ((NORTH, 10.0), (BOTH, 100.0), (SOUTH, -86400.0)):  # the last before the clock was set back
        world.store.add(Measurement(*pair, MeasurementKind.INCONCLUSIVE, now - age, error="no nodes"))
    network = world.new_network(interval=100.0)
    await network.measure_due_links()
    assert [bool(link.under_way) for link in network.list_links()] == [False, True, True]
    states = [link.state for link in (await world.wait_until_measured(network)).values()]
    assert states == [LinkState.UNMEASURED, LinkState.MEASURED, LinkState.MEASURED]


async def test_record_transfer_updates_link(world: World) -> None:
    world.network.record_transfer("south", "north", 8_000_000, 2.0)
    world.network.record_transfer("south", "north", 1_000, 2.0)
    await wait_for(lambda: world.link_between(BOTH) == Link(None, 4e6))
    (line,) = await world.network.read_history(*BOTH, 5)
    assert (line.kind, line.bandwidth, line.latency, line.job) == (MeasurementKind.TRANSFER, 4e6, None, None)
