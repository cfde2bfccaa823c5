"""Links are measured by jobs, on clusters whose agents do what the test says."""

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
from koalapy.model.errors import NotFoundError, UsageError
from koalapy.model.job import ComponentState, JobState
from koalapy.model.measurement import Measurement, MeasurementKind, MeasurementSettings
from koalapy.model.reports import ComponentStatus, Inventory
from koalapy.model.users import Accounts, Domain, Users
from koalapy.protocol import messages as wire
from koalapy.runner.preflight import CANNOT_REACH
from koalapy.scheduler.events import ClusterDrained
from koalapy.store.service_tables import SqlMeasurements
from tests import signals
from tests.daemon.test_hub import DEADLINE, Agent, Daemon, report, running, until
from tests.identities import DIRECTOR

NORTH, BOTH, SOUTH = ("north", "north"), ("north", "south"), ("south", "south")
RESULT = json.dumps({"program": "pingpong", "pairs": [{"latency": 0.25, "bandwidth": 2e6}]})
UNREACHED = f"node s {CANNOT_REACH} n at 10.0.0.1:4711 (timed out)"

Act = Callable[[str, bool], tuple[str, dict[str, Any]]]
"""What a component prints, and how it ends, given its token and whether it leads."""


def well(_token: str, leads: bool) -> tuple[str, dict[str, Any]]:
    return (f"rank 0 is here\n{RESULT}\n", {"program_exit": 0}) if leads else ("", {})


def unreached(_token: str, leads: bool) -> tuple[str, dict[str, Any]]:
    return "", {"error": UNREACHED, "infrastructure": True} if not leads else {}


def broken(_token: str, leads: bool) -> tuple[str, dict[str, Any]]:
    return ("No module named numpy\n", {"program_exit": 1}) if leads else ("", {})


def silent(_token: str, leads: bool) -> tuple[str, dict[str, Any]]:
    return ("hello\n", {"program_exit": 0}) if leads else ("", {})


def absurd(_token: str, leads: bool) -> tuple[str, dict[str, Any]]:
    told = '{"pairs": [{"latency": 0.1, "bandwidth": 5e-324}]}\n{"pairs": [{"latency": 1, "bandwidth": 1e308}]}\n'
    return (told, {"program_exit": 0}) if leads else ("", {})


class Site:
    """A cluster that gives every component its nodes, and does with its program what ``act`` says."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.act: Act = well
        self.deaf = False
        """Whether components get no nodes for the time being."""
        self.claimed: set[str] = set()
        self.most = 0
        """Components that had nodes at once."""
        self._done = 0

    async def live(self) -> None:
        while True:
            for message in self.agent.heard[self._done :]:
                if self.deaf and message["type"] == "submit":
                    break
                self._done += 1
                self._hear(message)
            await signals.until(self._has_more, timeout_s=float("inf"))

    def _has_more(self) -> bool:
        """Return whether a message has come that is not left unread."""
        unread = self.agent.heard[self._done :]
        return bool(unread) and not (self.deaf and unread[0]["type"] == "submit")

    def _hear(self, message: dict[str, Any]) -> None:
        kind, token = message["type"], message.get("token", "")
        if kind in ("submit", "open", "stop"):
            self.agent.says(wire.Ack(id=message["id"]))
        if kind == "submit":
            self.claimed.add(token)
            self.most = max(self.most, len(self.claimed))
            hosts = [f"10.0.{len(self.claimed)}.{i}" for i in range(message["size"])]
            self.agent.says(ComponentStatus(token=token, state=ComponentState.CLAIMED, hosts=tuple(hosts)))
        elif kind == "open":
            self.agent.says(ComponentStatus(token=token, state=ComponentState.RUNNING, hosts=()))
            printed, end = self.act(token, message["head"] == token)
            if printed:
                data = base64.b64encode(printed.encode()).decode()
                self.agent.says(wire.Output(token=token, offset=0, data=data))
            self._end(token, **end)
        elif kind == "stop":
            self._end(token)

    def _end(self, token: str, **how: Any) -> None:
        self.claimed.discard(token)
        self.agent.says(ComponentStatus(token=token, state=ComponentState.ENDED, hosts=(), **how), report(2))


async def eventually(look: Callable[[], object]) -> None:
    """Until it is so."""
    await signals.until(lambda: look())


class World:
    """A daemon with two clusters of two nodes, and its information on their network."""

    def __init__(self, daemon: Daemon, north: Site, south: Site, path: Path) -> None:
        self.daemon = daemon
        self.sites = {"north": north, "south": south}
        self.store = SqlMeasurements(daemon.store.database)
        self.jobs = daemon.jobs
        self.network = self.new_network()

    def new_network(self, configured: dict[ClusterPair, Link] | None = None, **how: Any) -> Network:
        book = LinkTable(("north", "south"), configured or {}, self.store.latest())
        return Network(self.daemon.engine, self.daemon.queries, self.jobs, self.store, book, MeasurementSettings(**how))

    async def measured(self, network: Network | None = None) -> dict[ClusterPair, Any]:
        """All links once nothing is under way any more."""
        network = network or self.network
        await eventually(lambda: not any(link.under_way for link in network.list_links()))
        await self.daemon.engine.commit(WorkItem())
        return {link.pair: link for link in network.list_links()}

    def link(self, pair: ClusterPair) -> Link:
        """As the scheduler knows it."""
        return self.daemon.scheduler.queries.grid.link(*pair)

    async def job(self, ident: int, *states: JobState) -> None:
        def look() -> bool:
            job = self.daemon.scheduler.queries.job(ident) or self.daemon.store.job(ident)
            return job is not None and job.state in states

        await eventually(look)


@asynccontextmanager
async def world_of(path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running(path))
        sites, lives = [], []
        for name in ("north", "south"):
            agent = await stack.enter_async_context(daemon.agent_of(name))
            agent.says(Inventory(components=()), report(2))
            await until(daemon, name, ("usable", 2, ""))
            sites.append(Site(agent))
            lives.append(asyncio.create_task(sites[-1].live()))
        world = World(daemon, sites[0], sites[1], path)
        yield world
        await world.network.stop()
        for life in lives:
            life.cancel()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_of(tmp_path / "koala.db") as world:
        yield world


async def test_every_link_is_measured_one_after_the_other(world: World) -> None:
    asked = world.network.measure_links()
    assert [(each.pair, each.reason) for each in asked] == [(NORTH, ""), (BOTH, ""), (SOUTH, "")]
    assert world.network.measure_links([*BOTH]) == asked, "what is under way is not begun again"
    links = await world.measured()
    assert {pair: (link.state, link.link) for pair, link in links.items()} == dict.fromkeys(
        (NORTH, BOTH, SOUTH), (LinkState.MEASURED, Link(0.25, 2e6))
    )
    assert [world.link(pair) for pair in (NORTH, BOTH, SOUTH)] == [Link(0.25, 2e6)] * 3
    specs = [(await world.jobs.get(ident)).job.spec for ident in (1, 2, 3)]
    assert [spec.name for spec in specs] == ["network north-north", "network north-south", "network south-south"]
    assert {(spec.owner, spec.priority, spec.processes_per_node) for spec in specs} == {("koala", "low", 1)}
    assert world.daemon.scheduler.queries.jobs() == []
    assert [site.most for site in world.sites.values()] == [1, 1]
    (line,) = await world.network.read_history("south", "north", 10)
    assert (line.kind, line.job, line.latency, line.bandwidth) == (MeasurementKind.PINGPONG, 2, 0.25, 2e6)
    assert world.store.latest() == [links[pair].measurements.measured for pair in (NORTH, BOTH, SOUTH)]


async def test_who_asks_in_the_first_seconds_waits_for_the_agents(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running(tmp_path / "koala.db"))
        world = World(daemon, Site(None), Site(None), tmp_path / "koala.db")
        world.network.start()
        chance = asyncio.create_task(world.network.wait_for_agents())
        for name in ("north", "south"):
            assert not chance.done()
            agent = await stack.enter_async_context(daemon.agent_of(name))
            agent.says(Inventory(components=()), report(2))
            await until(daemon, name, ("usable", 2, ""))
        async with asyncio.timeout(DEADLINE):
            await chance
        assert [each.reason for each in world.network.measure_links()] == ["", "", ""]
        await world.network.stop()


async def test_who_does_not_come_is_waited_for_no_longer(tmp_path: Path) -> None:
    async with running(tmp_path / "koala.db") as daemon:
        world = World(daemon, Site(None), Site(None), tmp_path / "koala.db")
        world.network.start()
        async with asyncio.timeout(DEADLINE):
            await world.network.wait_for_agents()
        assert "has not connected yet" in world.network.measure_links()[0].reason


async def test_several_may_be_measured_at_once(world: World) -> None:
    network = world.new_network(parallel=2)
    for site in world.sites.values():
        site.deaf = True
    network.measure_links(pairs=[NORTH, SOUTH, BOTH])
    await eventually(lambda: [link.under_way and link.under_way.job for link in network.list_links()] == [1, None, 2])
    for site in world.sites.values():
        site.deaf = False
    assert {link.state for link in (await world.measured(network)).values()} == {LinkState.MEASURED}


async def test_nodes_that_do_not_reach_each_other_make_a_link_unreachable_until_they_do(world: World) -> None:
    network = world.new_network({BOTH: Link(0.1, 5e6)})
    world.daemon.scheduler.queries.grid.set_link(*BOTH, Link(0.1, 5e6))
    for site in world.sites.values():
        site.act = unreached
    network.measure_links(pairs=[("south", "north")])
    link = (await world.measured(network))[BOTH]
    assert (link.state, link.link, link.measurements.error) == (
        LinkState.UNREACHABLE,
        Link(unreachable=True),
        UNREACHED,
    )
    assert world.link(BOTH) == Link(unreachable=True), "what was configured is not so"
    assert (await world.jobs.get(1)).job.restarts == 0
    assert world.new_network({BOTH: Link(0.1)}).list_links()[1].state is LinkState.UNREACHABLE, "after a restart, too"
    for site in world.sites.values():
        site.act = well
    network.measure_links(pairs=[BOTH])
    assert (await world.measured(network))[BOTH].state is LinkState.MEASURED
    assert world.link(BOTH) == Link(0.25, 2e6)


@pytest.mark.parametrize(
    ("act", "said"), [(broken, "No module named numpy"), (silent, "printed no result"), (absurd, "printed no result")]
)
async def test_a_program_that_tells_nothing_says_nothing_of_the_link(world: World, act: Act, said: str) -> None:
    network = world.new_network({BOTH: Link(0.1, 5e6)})
    world.sites["north"].act = act
    network.measure_links(pairs=[BOTH])
    link = (await world.measured(network))[BOTH]
    assert (link.state, link.link) == (LinkState.CONFIGURED, Link(0.1, 5e6))
    assert said in link.measurements.error
    assert [line.kind for line in await network.read_history(*BOTH, 5)] == [MeasurementKind.INCONCLUSIVE]


async def test_one_that_waits_too_long_for_nodes_is_cancelled_and_told(world: World) -> None:
    network = world.new_network(patience=0.05)
    world.sites["south"].deaf = True
    network.measure_links(pairs=[BOTH])
    await world.job(1, JobState.CLAIMING)
    await eventually(lambda: network.list_links()[1].measurements.inconclusive)
    assert network.list_links()[1].measurements.error.startswith("no nodes for 0.05 s: ")
    world.sites["south"].deaf = False
    await world.job(1, JobState.CANCELLED)


async def test_a_cluster_that_is_not_used_is_not_measured_and_one_of_a_single_node_not_within(world: World) -> None:
    world.sites["south"].agent.says(report(1))
    await until(world.daemon, "south", ("usable", 1, ""))
    await world.daemon.engine.commit(WorkItem(events=(ClusterDrained("north", "ops", "new switches"),)))
    reasons = {asked.pair: asked.reason for asked in world.network.measure_links()}
    drained = "north is drained: by ops: new switches"
    within = "south has 1 node; measuring within a cluster needs 2"
    assert reasons == {NORTH: drained, BOTH: drained, SOUTH: within}
    assert world.daemon.scheduler.queries.jobs() == []


async def test_a_daemon_goes_on_with_what_the_one_before_had_begun(world: World) -> None:
    world.sites["south"].deaf = True
    world.network.measure_links(pairs=[BOTH])
    await world.job(1, JobState.CLAIMING)
    await world.network.stop()
    twice = await world.jobs.submit((await world.jobs.get(1)).job.spec, DIRECTOR)
    another = world.new_network()
    another.start()
    assert [each.job for each in another.measure_links(pairs=[BOTH])] == [1], "it is under way"
    await eventually(lambda: not (job := world.daemon.scheduler.queries.job(twice[0].job.id)) or job.ending)
    world.sites["south"].deaf = False
    await world.job(twice[0].job.id, JobState.CANCELLED)
    assert (await world.measured(another))[BOTH].link == Link(0.25, 2e6)
    assert [line.job for line in await another.read_history(*BOTH, 5)] == [1]


async def test_a_job_that_is_only_called_like_a_measurement_is_none(world: World) -> None:
    spec = replace(measurement_spec(BOTH, ("python", "-m", "mine")), owner="koala")
    world.sites["south"].deaf = True
    await world.jobs.submit(spec, DIRECTOR)
    world.network.start()
    assert not any(link.under_way for link in world.network.list_links())
    world.sites["south"].deaf = False
    await world.job(1, JobState.SUCCEEDED)
    assert world.store.latest() == []


async def test_clusters_of_somebodys_own_are_measured_by_jobs_of_theirs(world: World) -> None:
    own, other = Domain("own", "ada"), Domain("own", "bob")
    queries = world.daemon.engine.queries
    queries.accounts = Accounts(Users({}), {"north": own, "south": own})
    (reply,) = world.network.measure_links(pairs=[BOTH])
    assert reply.reason == ""
    assert (await world.measured(world.network))[BOTH].link == Link(0.25, 2e6)
    assert (await world.jobs.get(1)).job.spec.owner == "ada"
    queries.accounts = Accounts(Users({}), {"north": own, "south": other})
    assert [reply.reason for reply in world.network.measure_links(pairs=[BOTH])] == ["north is ada's own"]
    queries.accounts = Accounts(Users({}), {"north": own, "south": Domain("mapped")})
    assert [reply.reason for reply in world.network.measure_links(pairs=[BOTH])] == ["ada has no account on south"]
    queries.accounts = Accounts(Users({}), {"north": Domain("mapped")})
    assert [reply.reason for reply in world.network.measure_links(pairs=[BOTH])] == ["koala has no account on north"]


async def test_a_clock_that_was_set_back_keeps_nothing_from_being_measured(world: World) -> None:
    for pair, later in ((NORTH, 86400.0), (BOTH, -10.0), (SOUTH, 0.0)):
        at = world.daemon.engine.clock() + later
        world.store.add(Measurement(*pair, MeasurementKind.PINGPONG, at, 0.1, 1e6))
    network = world.new_network(interval=100.0)
    await network.measure_due_links()
    assert [bool(link.under_way) for link in network.list_links()] == [True, False, False]
    await world.measured(network)


async def test_what_is_due_is_measured_and_nothing_else(world: World) -> None:
    await world.network.measure_due_links()
    assert not any(link.under_way for link in world.network.list_links()), "there is no interval"
    now = world.daemon.engine.clock()
    for pair, age in ((NORTH, 0.0), (BOTH, 100.0)):
        world.store.add(Measurement(*pair, MeasurementKind.INCONCLUSIVE, now - age, error="no nodes"))
    network = world.new_network(interval=100.0)
    await network.measure_due_links()
    assert [bool(link.under_way) for link in network.list_links()] == [False, True, True]
    assert [link.state for link in (await world.measured(network)).values()] == [
        LinkState.UNMEASURED,
        LinkState.MEASURED,
        LinkState.MEASURED,
    ]


async def test_transfers_are_learned_from(world: World) -> None:
    world.network.record_transfer("south", "north", 8_000_000, 2.0)
    world.network.record_transfer("south", "north", 1_000, 2.0)
    await eventually(lambda: world.link(BOTH) == Link(None, 4e6))
    (line,) = await world.network.read_history(*BOTH, 5)
    assert (line.kind, line.bandwidth, line.latency, line.job) == (MeasurementKind.TRANSFER, 4e6, None, None)


@pytest.mark.parametrize(
    ("order", "field"),
    [
        ({"clusters": ["north", "nroth"]}, "clusters[1]"),
        ({"pairs": [("north", "west")]}, "pairs[0][1]"),
        ({"clusters": []}, "clusters"),
        ({"pairs": []}, "pairs"),
        ({"clusters": ["north"], "pairs": [BOTH]}, "pairs"),
    ],
)
async def test_what_is_no_link_is_refused_by_its_field(world: World, order: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as refusal:
        world.network.measure_links(**order)
    assert refusal.value.field == field
    assert refusal.value.hint
    with pytest.raises(NotFoundError):
        await world.network.read_history("north", "west", 5)
    assert not any(link.under_way for link in world.network.list_links())
