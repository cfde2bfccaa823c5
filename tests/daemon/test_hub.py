"""Messages of agents and their effects on cluster states."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.daemon.agents import hub
from koalapy.daemon.agents.agent_messages import AgentMessages, TransferFeedback
from koalapy.daemon.agents.hub import Hub, compare_versions
from koalapy.daemon.agents.questions import Questions
from koalapy.daemon.agents.session import MAX_QUEUED, MAX_UNREAD, Session, Sessions
from koalapy.daemon.agents.streams import Streams
from koalapy.daemon.engine.engine import Engine, Outbox, WorkItem, steady_clock
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.jobs.output import Outputs
from koalapy.daemon.observability.audit import Audit
from koalapy.model.errors import StoreUnavailable
from koalapy.model.job import Job
from koalapy.model.job_spec import JobSpec
from koalapy.model.profile import ClusterProfile
from koalapy.model.reports import ClusterReport, Inventory
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest
from koalapy.model.wording import is_utf8
from koalapy.policies.registry import builtin_policies
from koalapy.protocol import messages as wire
from koalapy.protocol.frames import MAX_BATCH_SIZE, PLAN, Plan, encode_frame
from koalapy.scheduler.clusters import NO_REPORT_YET, ClusterStatus
from koalapy.scheduler.effects import MAX_STRAYS
from koalapy.scheduler.events import JobCancelled, JobSubmitted
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.output import OutputStore
from koalapy.store.records import ClusterRecord
from koalapy.store.sql import JobStore
from tests import signals
from tests.databases import migrate

DEADLINE = 30.0


class Agent:
    """Both ends of an agent's connection."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[str | None] = asyncio.Queue()
        self.heard: list[dict[str, Any]] = []
        self.closed = ""

    def say_to_daemon(self, *messages: wire.FromAgent) -> None:
        self.says_frame(encode_frame(wire.from_agent, list(messages)))

    def says_frame(self, frame: str) -> None:
        self._said.put_nowait(frame)

    async def frames(self) -> AsyncIterator[str]:
        while (frame := await self._said.get()) is not None:
            yield frame

    async def send(self, frame: str) -> None:
        self.heard += json.loads(frame)

    async def close(self, reason: str) -> None:
        self.closed = reason
        self._said.put_nowait(None)


class Daemon:
    """Engine, store and hub, with the clusters north and south."""

    def __init__(
        self,
        path: Path,
        unreachable_after: float = 60.0,
        max_strays: int = MAX_STRAYS,
        max_unread: int = MAX_UNREAD,
        feedback: TransferFeedback | None = None,
        audit: Audit | None = None,
        profiles: dict[str, ClusterProfile] | None = None,
    ) -> None:
        database = make_engine(f"sqlite:///{path}")
        migrate(database)
        self.store = JobStore(Database(database))
        nonces = count(0xFA)
        clusters = [ClusterStatus(name, profile=ClusterProfile()) for name in ("north", "south")]
        self.scheduler = Scheduler(
            SchedulerState(Rules(), builtin_policies(), clusters), nonces=lambda: f"{next(nonces):x}"
        )
        self.queries = self.scheduler.queries
        self.sessions = sessions = Sessions(clock := steady_clock())
        self.engine = Engine(
            self.scheduler,
            self.store,
            Outbox((), 1),
            epoch=1,
            describe=self.describe,
            clock=clock,
            sessions=sessions,
            max_strays=max_strays,
        )
        self.kept = OutputStore(path.parent / "output", 1000)
        self.outputs = Outputs(self.engine, self.queries, self.store, self.kept)
        self.jobs = Jobs(self.engine, self.queries, self.store, self.outputs, 1, self.describe)
        questions = Questions(sessions.offer_message, lambda cluster, source, path: False)
        self.streams = streams = Streams(self.queries, sessions)
        self.messages = AgentMessages(self.engine, self.outputs, sessions, questions, streams, feedback, None, audit)
        self.hub = Hub(
            self.engine,
            sessions,
            self.messages,
            questions,
            streams,
            wire.Welcome(epoch=1, instance="test", life="own", output_limit=1000),
            unreachable_after=unreachable_after,
            number_above=self.jobs.submissions.raise_next_number,
            max_unread=max_unread,
            profiles=profiles or {},
        )

    def describe(self, name: str) -> ClusterRecord:
        cluster = self.scheduler.queries.grid[name]
        return ClusterRecord(
            name,
            "slurm",
            str(cluster.state),
            cluster.last_report.total,
            cluster.nodes.available,
            0,
            0,
            0,
            0,
            cluster.state_reason,
            None,
            1,
            1.0,
        )

    def cluster_view(self, name: str) -> tuple[str, int, str]:
        record = self.describe(name)
        return record.state, record.total, record.reason

    @asynccontextmanager
    async def agent_of(
        self, cluster: str, *known_daemons: wire.KnownDaemon, agent: Agent | None = None
    ) -> AsyncIterator[Agent]:
        agent = agent or Agent()
        serving = asyncio.create_task(self.hub.serve_connection(cluster, agent))
        agent.say_to_daemon(
            wire.Hello(cluster=cluster, version="1", lrm="slurm", host="head", pid=1, known=list(known_daemons))
        )
        yield agent
        await agent.close("")
        await serving


@asynccontextmanager
async def running_daemon(path: Path, unreachable_after: float = 60.0, **options: Any) -> AsyncIterator[Daemon]:
    daemon = Daemon(path, unreachable_after, **options)
    loop = asyncio.create_task(daemon.engine.run())
    yield daemon
    daemon.engine.stop()
    await loop
    daemon.store.close()


async def wait_for_state(daemon: Daemon, cluster: str, expected: tuple[str, int, str]) -> None:
    await signals.until(lambda: daemon.cluster_view(cluster) == expected)


async def connect_agent(daemon: Daemon, cluster: str, agent: Agent) -> None:
    """Let an agent report four idle nodes, and wait until its cluster is usable."""
    agent.say_to_daemon(Inventory(components=()), report_nodes(4))
    await wait_for_state(daemon, cluster, ("usable", 4, ""))


def report_nodes(total: int, problem: str = "") -> ClusterReport:
    return ClusterReport(total=total, idle=total, problem=problem)


async def test_cluster_shows_problem_of_resource_manager(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north") as north:
        async with daemon.agent_of("south") as south:
            await connect_agent(daemon, "south", south)
            agent = daemon.hub.describe_agent("north")
            assert agent.hello is not None
            assert (agent.hello.host, agent.hello.pid, agent.hello.version) == ("head", 1, "1")
            assert agent.comparison == "newer"
            assert agent.connected_at is not None
            north.say_to_daemon(report_nodes(0, "there is no partition fast"))
            await wait_for_state(daemon, "north", ("unreachable", 0, "there is no partition fast"))
            assert daemon.cluster_view("south") == ("usable", 4, ""), "nobody else is disturbed"
            north.say_to_daemon(Inventory(components=()), report_nodes(2))
            await wait_for_state(daemon, "north", ("usable", 2, ""))
            north.say_to_daemon(report_nodes(2, "squeue did not answer"))
            await wait_for_state(daemon, "north", ("unreachable", 2, "squeue did not answer"))
        await wait_for_state(daemon, "south", ("unreachable", 4, "its agent is not connected"))
        daemon.hub.note_rejection("south", "the token is not that of cluster south", "set the token")
        agent = daemon.hub.describe_agent("south")
        assert (agent.hello, agent.rejection and agent.rejection.remedy) == (None, "set the token")
        assert [(c.state, c.reason) for c in daemon.store.load().clusters if c.name == "north"] == [
            ("unreachable", "squeue did not answer")
        ]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.10.0", "same"),
        ("0.9.9", "older"),
        ("0.10.1", "newer"),
        ("1", "newer"),
        ("", "other"),
        ("0.10.0rc1", "other"),
    ],
)
def test_compare_versions_orders_by_numbers(version: str, expected: str) -> None:
    assert compare_versions(version, "0.10.0") == expected


async def test_hub_with_unavailable_database_rejects_agent(tmp_path: Path) -> None:
    """The agent reconnects and repeats its messages."""
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north") as north:

        def away(job: int, last: int | None = None) -> None:
            raise StoreUnavailable("the database does not answer")

        daemon.store.attempts = away  # type: ignore[method-assign, assignment]
        await connect_agent(daemon, "north", north)
        north.say_to_daemon(wire.Output(token="1.1.0", offset=0, data=""))
        await wait_for_state(daemon, "north", ("unreachable", 4, "its agent is not connected"))
        assert north.closed == "the database does not answer: connect again"


async def test_hub_with_unencodable_text_keeps_connection(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north") as north:
        await connect_agent(daemon, "north", north)
        await daemon.engine.commit(WorkItem())  # wait for the effects of the inventory
        daemon.sessions.send_commands(
            "north", [wire.Stop(id=1, epoch=1, token="1.1.0", reason="", signal="odd \ud800").model_dump()]
        )
        await signals.until(lambda: north.heard[-1]["type"] == "stop")
        assert (north.heard[-1]["signal"], north.closed) == ("odd ?", "")


@pytest.mark.parametrize(
    ("configured", "reported", "reason"),
    [
        ({"container_runtime": "apptainer"}, {"container_runtime": "apptainer"}, ""),
        ({"container_runtime": "apptainer"}, {}, ""),
        ({}, {"container_runtime": "apptainer"}, ""),
        (
            {"container_runtime": "apptainer"},
            {"container_runtime": "charliecloud"},
            "container_runtime is apptainer for the daemon and charliecloud for its agent",
        ),
        (
            {"container_runtime": "apptainer"},
            {"container_runtime": ""},
            "container_runtime is apptainer for the daemon and not set for its agent",
        ),
        ({"accepts_scripts": True}, {"accepts_scripts": True}, ""),
        ({"accepts_scripts": True}, {}, ""),
        ({"accepts_scripts": False}, {"accepts_scripts": False}, ""),
        (
            {"accepts_scripts": True},
            {"accepts_scripts": False},
            "accepts_scripts is true for the daemon and false for its agent",
        ),
        ({}, {"identity": "mapped"}, "identity is service for the daemon and mapped for its agent"),
    ],
)
async def test_hub_rejects_agent_with_another_configuration(
    tmp_path: Path, configured: dict[str, Any], reported: dict[str, Any], reason: str
) -> None:
    async with running_daemon(tmp_path / "koala.db", profiles={"north": ClusterProfile(**configured)}) as daemon:
        agent = Agent()
        agent.say_to_daemon(wire.Hello(cluster="north", version="1", lrm="slurm", host="head", pid=1, **reported))
        serving = asyncio.create_task(daemon.hub.serve_connection("north", agent))
        await signals.until(lambda: agent.heard or agent.closed)
        assert reason in agent.closed
        assert bool(reason) is bool(agent.closed)
        is_accepted_without_runtime = not reason and "container_runtime" not in reported
        assert daemon.sessions.may_ignore_containers("north") is is_accepted_without_runtime
        await agent.close("")
        await serving


async def test_hub_without_hello_rejects_agent(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        await daemon.hub.serve_connection("north", silent := Agent())
        assert silent.closed == f"the agent sent no hello within {hub.HELLO_TIMEOUT:g} s"


odd_texts = st.text(st.characters(), max_size=5) | st.sampled_from(["\ud800", "a\udcff", "\0"])


@given(odd_texts, st.lists(odd_texts, max_size=2), st.dictionaries(odd_texts, odd_texts, max_size=2))
def test_frame_of_any_messages_can_be_read_back(text: str, tokens: list[str], payload: dict[str, Any]) -> None:
    messages = [
        ClusterReport(total=1, idle=1, holding=frozenset(tokens), problem=text),
        wire.Answer(ident="1", payload=payload, error=text),
    ]
    frame = encode_frame(wire.from_agent, messages)
    frame.encode()
    read = wire.from_agent.validate_json(frame)
    assert [type(message) for message in read] == [ClusterReport, wire.Answer]
    if text.isprintable() and is_utf8("".join([*tokens, *payload, *payload.values()])):
        assert read == messages


async def test_hub_closes_connection_that_cannot_be_sent_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(agent: Agent, frame: str) -> None:
        raise ValueError("cannot be encoded")

    monkeypatch.setattr(Agent, "send", broken)
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north") as north:
        await signals.until(lambda: north.closed)
        assert north.closed == "the daemon failed to send: connect again"


# Silent agents


class Attentive(Agent):
    """An agent that answers every probe unless ``stopped``."""

    stopped = False

    async def send(self, frame: str) -> None:
        await super().send(frame)
        for message in json.loads(frame):
            if message["type"] == "probe" and not self.stopped:
                self.say_to_daemon(wire.Confirmed(sequence=message["sequence"]))


async def test_hub_disconnects_silent_agent(tmp_path: Path) -> None:
    """The connection of a stopped agent, or of a lost host, stays open."""
    async with (
        running_daemon(tmp_path / "koala.db", 0.4) as daemon,
        daemon.agent_of("north", agent=(north := Attentive())),
    ):
        await connect_agent(daemon, "north", north)
        message_count = len(north.heard)
        await signals.until(lambda: len(north.heard) >= message_count + 10)
        assert daemon.cluster_view("north")[0] == "usable", "it answers"
        north.stopped = True
        await wait_for_state(daemon, "north", ("unreachable", 4, "its agent has not answered for 0.4 s"))
        assert north.closed == "no answer: connect again"


async def test_hub_with_unread_frames_does_not_count_silence() -> None:
    """The daemon may process a message for longer than the allowed silence."""
    agent = Agent()
    session = Session("north", agent, wire.Hello(cluster="north", version="1", lrm="slurm", host="head", pid=1))
    frames = session.receive_frames(agent.frames())
    agent.say_to_daemon(report_nodes(4))
    await anext(frames)
    silent = asyncio.create_task(session.wait_until_silent(0.02))
    _, waiting = await asyncio.wait({silent}, timeout=0.2)
    assert waiting, "one frame is still being dealt with"
    listening = asyncio.create_task(anext(frames))
    async with asyncio.timeout(DEADLINE):
        await silent
    listening.cancel()


async def test_later_inventory_replaces_queued_commands() -> None:
    session = make_session(agent := Agent(), max_unread=500)
    stops = [{"type": "stop", "id": ident} for ident in range(3)]
    session.start_sending(stops)
    assert session.offer_message(wire.StreamEnd(stream="s"))
    session.start_sending(stops[1:])
    sending = asyncio.create_task(session.send_queued())
    await signals.until(lambda: agent.heard)
    sending.cancel()
    assert [message.get("id", message["type"]) for message in agent.heard] == ["stream_end", 1, 2]


async def test_agent_that_reads_nothing_counts_as_silent() -> None:
    session = make_session(Agent(), max_unread=500)
    session.start_sending({"type": "stop", "id": ident} for ident in range(MAX_QUEUED + 1))
    assert await session.wait_until_silent(10.0) == "does not read what it is sent"
    assert session.silence == 0.0


async def test_agents_that_read_nothing_do_not_delay_the_end_of_the_daemon() -> None:
    class HangingAgent(Agent):
        async def close(self, reason: str) -> None:
            await super().close(reason)
            await asyncio.Event().wait()

    sessions, agents = Sessions(lambda: 0.0), [HangingAgent(), HangingAgent(), Agent()]
    for index, agent in enumerate(agents):
        hello = wire.Hello(cluster=f"c{index}", version="1", lrm="slurm", host="head", pid=1)
        sessions.add(Session(hello.cluster, agent, hello))
    async with asyncio.timeout(DEADLINE):
        await sessions.close()
    assert [agent.closed for agent in agents] == ["the daemon is shutting down"] * 3


def make_session(agent: Agent, max_unread: int) -> Session:
    hello = wire.Hello(cluster="north", version="1", lrm="slurm", host="head", pid=1)
    return Session("north", agent, hello, max_unread)


async def test_session_with_full_queue_sends_renewal_before_queued_messages() -> None:
    agent = Agent()
    session = make_session(agent, max_unread=500)
    session.start_sending([])
    while session.offer_message(wire.StreamEnd(stream="s")):
        pass
    session.renew_lease(1)
    session.renew_lease(2)
    sending = asyncio.create_task(session.send_queued())
    await signals.until(lambda: agent.heard)
    sending.cancel()
    assert agent.heard[0] == {"type": "lease_renewed", "number": 2}
    assert [message["type"] for message in agent.heard].count("lease_renewed") == 1


async def test_session_sends_renewal_between_frames_of_a_flood() -> None:
    frames: list[str] = []

    class Flooded(Agent):
        async def send(self, frame: str) -> None:
            frames.append(frame)
            if len(frames) == 1:
                session.renew_lease(7)

    session = make_session(Flooded(), max_unread=10 * MAX_BATCH_SIZE)
    session.start_sending([{"type": "stop", "reason": "x" * MAX_BATCH_SIZE}] * 4)
    sending = asyncio.create_task(session.send_queued())
    await signals.until(lambda: len(frames) == 5)
    sending.cancel()
    assert json.loads(frames[1]) == [{"type": "lease_renewed", "number": 7}]


async def test_sessions_with_plans_send_in_different_turns_of_the_event_loop() -> None:
    """Each frame may have a megabyte: those of a hundred agents would delay all other tasks."""
    turn, turns, loop, hang = 0, list[int](), asyncio.get_running_loop(), asyncio.Event()

    def count_turn() -> None:
        nonlocal turn
        turn += 1
        if len(turns) < 20:
            loop.call_soon(count_turn)

    class Counting(Agent):
        async def send(self, frame: str) -> None:
            turns.append(turn)
            await hang.wait()  # an agent that does not read delays no other

    sessions, plan = Sessions(lambda: 0.0), Plan.of({"job": 7, "generation": 1})
    pumps = []
    for index in range(20):
        hello = wire.Hello(cluster=f"c{index}", version="1", lrm="slurm", host="head", pid=1)
        sessions.add(session := Session(hello.cluster, Counting(), hello))
        session.start_sending([{"type": "open", "id": index, PLAN: plan}])
        pumps.append(asyncio.create_task(session.send_queued()))
    count_turn()
    await signals.until(lambda: len(turns) == 20)
    for pump in pumps:
        pump.cancel()
    assert len(set(turns)) == 20


async def test_session_sends_joined_openings_only_to_agents_that_accept_them() -> None:
    plan = Plan.of({"job": 7, "generation": 1})
    opens = [{"type": "open", "id": ident, "epoch": 1, "token": f"7.1.{ident}", PLAN: plan} for ident in range(3)]
    heard = {}
    for joins in (False, True):
        hello = wire.Hello(cluster="north", version="1", lrm="slurm", host="head", pid=1, joins_opens=joins)
        session = Session("north", agent := Agent(), hello)
        session.start_sending(opens)
        sending = asyncio.create_task(session.send_queued())
        await signals.until(lambda agent=agent: agent.heard)  # type: ignore[misc]
        sending.cancel()
        heard[joins] = [(message["id"], len(message.get("others", ()))) for message in agent.heard]
    assert heard == {False: [(0, 0), (1, 0), (2, 0)], True: [(0, 2)]}


async def test_session_sends_renewal_only_once_the_inventory_is_applied() -> None:
    agent = Agent()
    session = make_session(agent, max_unread=500)
    session.renew_lease(3)
    sending = asyncio.create_task(session.send_queued())
    session.queue_messages([wire.Probe(sequence=1, look=False)])
    await signals.until(lambda: agent.heard)
    assert [message["type"] for message in agent.heard] == ["probe"]
    session.start_sending([])
    await signals.until(lambda: agent.heard[1:])
    sending.cancel()
    assert agent.heard[1] == {"type": "lease_renewed", "number": 3}


async def test_hub_confirmation_has_time_of_request(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north") as north:
        await connect_agent(daemon, "north", north)
        await daemon.engine.commit(WorkItem())
        requested_after = daemon.engine.clock()
        daemon.sessions.request_confirmation("north")
        daemon.sessions.request_confirmation("south")
        probes = await signals.until(lambda: [m for m in north.heard if m["type"] == "probe"])
        assert [probe["look"] for probe in probes] == [True]
        answered_at = daemon.engine.clock()
        cluster = daemon.scheduler.queries.grid["north"]
        north.say_to_daemon(wire.Confirmed(sequence=probes[0]["sequence"] + 1), report_nodes(3))
        await wait_for_state(daemon, "north", ("usable", 3, ""))
        assert cluster.contact.confirmed_at < requested_after, "that answers nothing"
        north.say_to_daemon(wire.Confirmed(sequence=probes[0]["sequence"]), report_nodes(2))
        await wait_for_state(daemon, "north", ("usable", 2, ""))
        assert requested_after <= cluster.contact.confirmed_at <= answered_at


async def test_hub_notifies_agent_while_jobs_wait(tmp_path: Path) -> None:
    """An agent learns at once, also at reconnection, that jobs wait for its cluster; the next probe reports the end."""

    async def awaited(agent: Agent) -> list[bool]:
        values = await signals.until(lambda: [m["awaited"] for m in agent.heard if m["type"] == "probe"])
        agent.heard.clear()
        return values

    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("south") as south:
        async with daemon.agent_of("north") as north:
            for agent in (north, south):
                agent.say_to_daemon(Inventory(components=()), ClusterReport(total=2, idle=0, background=2))
            await wait_for_state(daemon, "north", ("usable", 2, ""))
            await wait_for_state(daemon, "south", ("usable", 2, ""))
            on_north = FixedRequest((ComponentRequest(1, "north"),))
            await daemon.engine.commit(WorkItem(events=(JobSubmitted(Job(1, JobSpec(on_north, ("true",)), 0.0)),)))
            assert await awaited(north) == [True]
            await daemon.engine.commit(WorkItem(events=(JobSubmitted(Job(2, JobSpec(on_north, ("true",)), 0.0)),)))
            assert [m for m in (*north.heard, *south.heard) if m["type"] == "probe"] == []
        async with daemon.agent_of("north") as north:
            north.say_to_daemon(Inventory(components=()), report_nodes(0))
            assert await awaited(north) == [True]
            await daemon.engine.commit(WorkItem(events=tuple(JobCancelled(job, "") for job in (1, 2))))
            daemon.sessions.request_confirmation("north")
            assert await awaited(north) == [False]
            anywhere = JobSpec(FlexibleRequest(1), ("true",))
            await daemon.engine.commit(WorkItem(events=(JobSubmitted(Job(3, anywhere, 0.0)),)))
            assert (await awaited(north), await awaited(south)) == ([True], [True])


# Two agents of one cluster


def make_hello(pid: int, host: str = "head") -> wire.Hello:
    return wire.Hello(cluster="north", version="1", lrm="slurm", host=host, pid=pid)


async def test_hub_rejects_second_agent_while_first_answers(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north", agent=(north := Attentive())):
        await connect_agent(daemon, "north", north)
        for host, pid in (("head", 2), ("login", 1)):
            second = Agent()
            second.say_to_daemon(make_hello(pid, host))
            await daemon.hub.serve_connection("north", second)
            assert second.closed == "cluster north has an agent already, process 1 on head: stop one of them"
            assert not second.heard
        north.say_to_daemon(report_nodes(3))
        await wait_for_state(daemon, "north", ("usable", 3, ""))


@pytest.mark.parametrize("pid", [1, 2])
async def test_hub_replaces_hanging_or_reconnected_agent(tmp_path: Path, pid: int) -> None:
    async with running_daemon(tmp_path / "koala.db", 0.2) as daemon, daemon.agent_of("north") as first:
        await signals.until(lambda: first.heard)
        second = Attentive()
        second.say_to_daemon(make_hello(pid))
        serving = asyncio.create_task(daemon.hub.serve_connection("north", second))
        second.say_to_daemon(Inventory(components=()), report_nodes(2))
        await wait_for_state(daemon, "north", ("usable", 2, ""))
        assert first.closed
        await second.close("")
        await serving


async def test_hub_connects_reconnected_agent_after_inventory(tmp_path: Path) -> None:
    """The hub sends no commands to the agent before its inventory, for instance while its resource manager hangs."""
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north") as first:
        await connect_agent(daemon, "north", first)
        second = Attentive()
        second.say_to_daemon(make_hello(1))
        serving = asyncio.create_task(daemon.hub.serve_connection("north", second))
        await wait_for_state(daemon, "north", ("unreachable", 4, NO_REPORT_YET))
        second.say_to_daemon(Inventory(components=()), report_nodes(2))
        await wait_for_state(daemon, "north", ("usable", 2, ""))
        await second.close("")
        await serving


async def test_hub_releases_waiting_agent_when_first_disconnects(tmp_path: Path) -> None:
    """After a restart of the agent, the hub may read the new hello before the end of the old connection."""
    async with running_daemon(tmp_path / "koala.db", 1000.0) as daemon, daemon.agent_of("north") as first:
        await signals.until(lambda: first.heard)
        second = Attentive()
        second.say_to_daemon(make_hello(2))
        serving = asyncio.create_task(daemon.hub.serve_connection("north", second))
        await signals.until(lambda: any(m["type"] == "probe" for m in first.heard))
        await first.close("")
        second.say_to_daemon(Inventory(components=()), report_nodes(2))
        await wait_for_state(daemon, "north", ("usable", 2, ""))
        await second.close("")
        await serving


async def test_hub_renews_lease_only_once_cluster_is_reachable(tmp_path: Path) -> None:
    """Until then the scheduler may give up the components.

    The last early request is answered once the cluster is reachable.
    """
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north") as north:
        for number in (1, 2):
            north.say_to_daemon(wire.RenewLease(number=number))
        await connect_agent(daemon, "north", north)
        north.say_to_daemon(wire.RenewLease(number=3))
        await signals.until(lambda: 3 in count_renewals(north))
    assert count_renewals(north) in ([2, 3], [3]), "only the last question before that, at its end"


def count_renewals(agent: Agent) -> list[int]:
    """Return the numbers of the answered lease renewals."""
    return [message["number"] for message in agent.heard if message["type"] == "lease_renewed"]


async def test_session_silence_starts_at_last_frame(tmp_path: Path) -> None:
    """That frame may have renewed a lease, so the daemon's count must not start earlier."""
    session = Session("north", Agent(), wire.Hello(cluster="north", version="1", lrm="slurm", host="head", pid=1))
    frames = session.receive_frames(_one_frame())
    await anext(frames)
    session.silence = 5.0  # as counted by periodic checks, the first of which followed the frame
    assert session.heard_ago < 5.0


async def _one_frame() -> AsyncIterator[str]:
    yield "[]"
