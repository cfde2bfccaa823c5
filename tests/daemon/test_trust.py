"""Trust in agents, which may report only on components of their own cluster."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from koalapy.daemon.agents.agent_messages import TransferFeedback
from koalapy.daemon.engine.engine import WorkItem
from koalapy.daemon.observability.audit import Audit
from koalapy.model.audit import AuditFilter
from koalapy.model.job import ComponentState, Job
from koalapy.model.job_spec import JobSpec
from koalapy.model.reports import ComponentStatus, Inventory, StageStatus, TransferMeasurement
from koalapy.model.request import ComponentRequest, FixedRequest, InputFile
from koalapy.protocol import messages as wire
from koalapy.scheduler.events import JobSubmitted
from tests import signals
from tests.daemon.test_hub import Agent, Daemon, connect_agent, report_nodes, running_daemon, wait_for_state
from tests.memory_stores import memory_stores

COUPLED = FixedRequest((ComponentRequest(1, "north"), ComponentRequest(2, "south")))
ON_NORTH = FixedRequest((ComponentRequest(1, "north"),))


async def wait_for_job(true: Callable[[], object]) -> None:
    await signals.until(lambda: true())


class Grid:
    """A daemon with simulated agents of the clusters north and south."""

    def __init__(self, daemon: Daemon, north: Agent, south: Agent) -> None:
        self.daemon, self.north, self.south = daemon, north, south

    async def submit_job(self, ident: int, request: FixedRequest, **fields: Any) -> list[str]:
        """Submit a job; return its tokens once its components were submitted."""
        job = Job(ident, JobSpec(request, ("true",), **fields), 0.0)
        await self.daemon.engine.commit(WorkItem(events=(JobSubmitted(job),)))
        placed = self.daemon.scheduler.queries.job(ident)
        assert placed is not None
        tokens = [placed.token(index) for index in range(len(request.components))]
        agents = [{"north": self.north, "south": self.south}[c.cluster or ""] for c in request.components]
        await wait_for_job(
            lambda: all(received_messages(a, "submit", token=t) for a, t in zip(agents, tokens, strict=True))
        )
        return tokens

    async def read_output(self, token: str) -> bytes:
        await self.daemon.engine.commit(WorkItem())
        return b"".join(piece.data for piece in self.daemon.kept.read(token, 0, to_the_end=True))

    async def all_taken_in(self, agent: Agent) -> None:
        """Wait until the daemon has processed all messages of this agent, which it does in order."""
        mark = f"mark {len(agent.heard)}"
        agent.say_to_daemon(make_relay("nobody", mark))
        await wait_for_job(lambda: received_messages(agent, "relay_failed", token=mark))
        await self.daemon.engine.commit(WorkItem())


def received_messages(agent: Agent, kind: str, **fields: object) -> list[dict[str, Any]]:
    return [m for m in agent.heard if m["type"] == kind and all(m[k] == v for k, v in fields.items())]


def make_relay(target: str, sender: str, **payload: object) -> wire.Relay:
    return wire.Relay(token=target, node=0, payload=payload, sender=sender, sender_node=0)


def make_output(token: str, offset: int, text: bytes) -> wire.Output:
    return wire.Output(token=token, offset=offset, data=base64.b64encode(text).decode())


@asynccontextmanager
async def open_grid(path: Path, **options: Any) -> AsyncIterator[Grid]:
    """Yield a running daemon with the agents of both clusters."""
    async with (
        running_daemon(path, **options) as daemon,
        daemon.agent_of("north") as north,
        daemon.agent_of("south") as south,
    ):
        await connect_agent(daemon, "north", north)
        await connect_agent(daemon, "south", south)
        yield Grid(daemon, north, south)


@pytest.mark.evidence("G2", "R7")
async def test_relay_reaches_same_attempt_from_own_cluster_only(tmp_path: Path) -> None:
    async with open_grid(tmp_path / "koala.db") as grid:
        head, tail = await grid.submit_job(1, COUPLED)
        other_head, other_tail = await grid.submit_job(2, COUPLED)
        of_another_attempt = tail.rpartition(".")[0] + ".0"
        grid.north.say_to_daemon(make_relay(tail, tail, op="launch", command="id"))
        grid.north.say_to_daemon(make_relay(tail, other_tail, op="launch", command="id"))
        grid.north.say_to_daemon(make_relay(tail, other_head, op="launch", command="id"))
        grid.north.say_to_daemon(make_relay(tail, of_another_attempt, op="launch", command="id"))
        grid.north.say_to_daemon(make_relay(of_another_attempt, head, op="launch", command="id"))
        grid.north.say_to_daemon(make_relay(tail.rpartition(".")[0], head, op="launch", command="id"))
        grid.north.say_to_daemon(make_relay("9.1.0.77", "9.1.1.77", op="launch", command="id"))
        await wait_for_job(lambda: len(received_messages(grid.north, "relay_failed")) == 7)
        assert not received_messages(grid.south, "relay")
        grid.north.say_to_daemon(make_relay(tail, head, op="launch", command="true"))
        await wait_for_job(lambda: received_messages(grid.south, "relay"))
        assert [m["payload"]["command"] for m in received_messages(grid.south, "relay")] == ["true"]


@pytest.mark.evidence("J3", "R8")
async def test_rejected_runner_reports_cover_own_cluster_only(tmp_path: Path) -> None:
    audit = Audit(memory_stores().audit, time.time)
    async with open_grid(tmp_path / "koala.db", audit=audit) as grid:
        head, tail = await grid.submit_job(1, COUPLED)
        for token in (tail, "9.1.0.77", head.rpartition(".")[0]):
            grid.north.say_to_daemon(wire.RejectedRunner(token=token, node=0, how="second"))
        grid.north.say_to_daemon(wire.RejectedRunner(token=head, node=0, how="forged", address="10.0.0.9", times=7))
        await grid.all_taken_in(grid.north)
        (entry,) = await signals.poll(lambda: audit.read_entries(AuditFilter()))
        assert (entry.action, entry.address, entry.target) == ("impersonate-runner", "10.0.0.9 on north", "job 1")
        assert entry.detail == f"node 0 of {head}, without the node's secret, 7 times since the last report"


@pytest.mark.evidence("G1")
async def test_output_of_other_cluster_is_ignored(tmp_path: Path) -> None:
    async with open_grid(tmp_path / "koala.db") as grid:
        head, tail = await grid.submit_job(1, COUPLED)
        grid.south.say_to_daemon(make_output(head, 0, b"forged, and long enough to hide what is genuine\n"))
        grid.south.say_to_daemon(make_output(head.rpartition(".")[0], 0, b"forged\n"))
        await grid.all_taken_in(grid.south)
        assert await grid.read_output(head) == b""
        grid.north.say_to_daemon(make_output(head, 0, b"genuine\n"))
        await wait_for_job(lambda: received_messages(grid.north, "output_ack", token=head, offset=8))
        grid.south.say_to_daemon(make_output(head, 8, b"forged\n"))
        await grid.all_taken_in(grid.south)
        assert await grid.read_output(head) == b"genuine\n"
        grid.south.say_to_daemon(make_output(tail, 0, b"its own\n"))
        await wait_for_job(lambda: received_messages(grid.south, "output_ack", token=tail, offset=8))


async def test_output_is_accepted_from_current_cluster_only(tmp_path: Path) -> None:
    """A component may be placed on another cluster before it starts."""
    async with open_grid(tmp_path / "koala.db") as grid:
        (token,) = await grid.submit_job(1, ON_NORTH)
        grid.north.say_to_daemon(make_output(token, 0, b"early\n"))
        await wait_for_job(lambda: received_messages(grid.north, "output_ack", token=token))
        job = grid.daemon.scheduler.queries.job(1)
        assert job is not None
        grid.daemon.scheduler._ledger.update_component(job, 0, cluster="south")
        grid.north.say_to_daemon(make_output(token, 6, b"late\n"))
        await grid.all_taken_in(grid.north)
        grid.south.say_to_daemon(make_output(token, 6, b"there\n"))
        await wait_for_job(lambda: received_messages(grid.south, "output_ack", token=token, offset=12))
        assert len(received_messages(grid.north, "output_ack")) == 1


async def test_output_of_ended_attempt_needs_its_cluster(tmp_path: Path) -> None:
    async with open_grid(tmp_path / "koala.db") as grid:
        (token,) = await grid.submit_job(1, ON_NORTH)
        grid.north.say_to_daemon(
            ComponentStatus(token=token, state=ComponentState.ENDED, error="lost a node", infrastructure=True)
        )
        await wait_for_job(lambda: (job := grid.daemon.scheduler.queries.job(1)) is None or job.generation > 1)
        grid.south.say_to_daemon(make_output(token, 0, b"forged\n"))
        grid.north.say_to_daemon(make_output(token, 0, b"its last words\n"))
        await wait_for_job(lambda: received_messages(grid.north, "output_ack", token=token))
        await grid.all_taken_in(grid.south)
        assert await grid.read_output(token) == b"its last words\n"
        assert not received_messages(grid.south, "output_ack")


@pytest.mark.evidence("G1", "C5")
async def test_component_status_of_other_cluster_is_ignored(tmp_path: Path) -> None:
    async with open_grid(tmp_path / "koala.db") as grid:
        (token,) = await grid.submit_job(1, ON_NORTH)
        grid.south.say_to_daemon(ComponentStatus(token=token, state=ComponentState.ENDED, program_exit=0))
        grid.south.say_to_daemon(StageStatus(token=token, state="failed", size=0, staged=0, error="forged"))
        await grid.all_taken_in(grid.south)
        assert grid.daemon.scheduler.queries.find(token) is not None
        assert received_messages(grid.south, "forget", token=token), "it is told that this is none of its components"
        # The honest cluster's stray is stopped although another cluster reports one of the same name.
        stray = "7.1.0.feed"
        grid.south.say_to_daemon(ComponentStatus(token=stray, state=ComponentState.RUNNING))
        grid.north.say_to_daemon(ComponentStatus(token=stray, state=ComponentState.RUNNING))
        for agent in (grid.north, grid.south):
            await wait_for_job(lambda agent=agent: received_messages(agent, "stop", token=stray))  # type: ignore[misc]


async def test_acknowledgement_of_other_cluster_is_ignored(tmp_path: Path) -> None:
    async with open_grid(tmp_path / "koala.db") as grid:
        await grid.submit_job(1, ON_NORTH)
        (order,) = received_messages(grid.north, "submit")
        grid.south.say_to_daemon(wire.Ack(id=order["id"]))
        await grid.all_taken_in(grid.south)
        assert [entry.id for entry in grid.daemon.store.load().outbox] == [order["id"]]
        grid.north.say_to_daemon(wire.Ack(id=order["id"]))
        await grid.all_taken_in(grid.north)
        assert not grid.daemon.store.load().outbox


class Listener:
    """Records the feedback of transfers."""

    def __init__(self) -> None:
        self.learned: list[tuple[object, ...]] = []

    def count_moved(self, *arguments: object) -> None:
        self.learned.append(arguments)

    def count_spoiled(self, *arguments: object) -> tuple[()]:
        self.learned.append(arguments)
        return ()


async def test_stage_status_of_other_cluster_is_ignored(tmp_path: Path) -> None:
    listener = Listener()
    async with open_grid(
        tmp_path / "koala.db", feedback=TransferFeedback(listener.count_moved, listener.count_spoiled)
    ) as grid:
        (token,) = await grid.submit_job(1, ON_NORTH)
        for agent in (grid.south, grid.north):
            agent.say_to_daemon(
                StageStatus(token=token, state="failed", size=0, staged=0, fault="file", file="data", source="north"),
                StageStatus(
                    token=token,
                    state="done",
                    size=0,
                    staged=0,
                    moved=(TransferMeasurement(source="north", size=1, seconds=1.0),),
                ),
            )
            await grid.all_taken_in(agent)
        assert listener.learned == []


async def test_transfer_is_counted_once_across_restarts(tmp_path: Path) -> None:
    listener = Listener()
    feedback = TransferFeedback(listener.count_moved, listener.count_spoiled)
    async with open_grid(tmp_path / "koala.db", feedback=feedback) as grid:
        file = InputFile("data", size=10**9, sites=("south",))
        request = FixedRequest((ComponentRequest(1, "north", inputs=(file,)),))
        job = Job(1, JobSpec(request, ("true",)), 0.0)
        await grid.daemon.engine.commit(WorkItem(events=(JobSubmitted(job),)))
        placed = grid.daemon.scheduler.queries.job(1)
        assert placed is not None
        assert placed.attempt is not None
        token = placed.stage_token(placed.attempt.components[0])
        moved = TransferMeasurement(source="south", size=10**9, seconds=9.0, flowed=10**8, flowing=1.0)
        finished = StageStatus(token=token, state="done", size=10**9, staged=10**9, moved=(moved,))
        for _ in range(2):
            grid.north.say_to_daemon(finished)
            await grid.all_taken_in(grid.north)
            feedback._counted.clear()  # as in the next daemon, which reads it from the store
        assert listener.learned == [("south", "north", 10**8, 1.0)]


async def test_inventories_with_unknown_components_bound_outbox(tmp_path: Path) -> None:
    async with open_grid(tmp_path / "koala.db", max_strays=5) as grid:
        for turn in range(4):
            components = [ComponentStatus(token=f"9{turn}{n}.1.0.77", state=ComponentState.RUNNING) for n in range(3)]
            stages = [StageStatus(token=f"8{turn}{n}.1.0.77", state="running", size=1, staged=0) for n in range(3)]
            grid.north.say_to_daemon(Inventory(components=tuple(components), stages=tuple(stages)))
        await grid.all_taken_in(grid.north)
        assert grid.daemon.engine.outbox.count_open("north") == 5
        head, _ = await grid.submit_job(1, COUPLED)
        assert received_messages(grid.north, "submit", token=head), "what is of live jobs has room"
        [stop, *_] = received_messages(grid.north, "stop")
        grid.north.say_to_daemon(wire.Ack(id=stop["id"]))
        await grid.all_taken_in(grid.north)
        assert grid.daemon.engine.outbox.count_open("north") == 5, "the submit, and one stray fewer"


@pytest.mark.parametrize("hosts", [[], ["n1", "n2", "n3"], ["n1"] * 1000])
async def test_component_with_wrong_host_count_is_not_claimed(tmp_path: Path, hosts: list[str]) -> None:
    """The plan of the gang contains the hosts and is sent to every other cluster."""
    async with open_grid(tmp_path / "koala.db") as grid:
        head, tail = await grid.submit_job(1, COUPLED)
        grid.south.say_to_daemon(ComponentStatus(token=tail, state=ComponentState.CLAIMED, hosts=("s1", "s2")))
        grid.north.say_to_daemon(ComponentStatus(token=head, state=ComponentState.CLAIMED, hosts=tuple(hosts)))
        await grid.all_taken_in(grid.north)
        await grid.all_taken_in(grid.south)
        assert not received_messages(grid.south, "open")
        grid.north.say_to_daemon(ComponentStatus(token=head, state=ComponentState.CLAIMED, hosts=("n1",)))
        await wait_for_job(lambda: received_messages(grid.south, "open"))
        [opened] = received_messages(grid.south, "open")
        assert [node["host"] for node in opened["nodes"]] == ["n1", "s1", "s2"]


class Deaf(Agent):
    """An agent that sends, and reads only while ``reads`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, frame: str) -> None:
        await self.reads.wait()
        await super().send(frame)


async def test_agent_that_does_not_read_bounds_memory(tmp_path: Path) -> None:
    deaf = Deaf()
    async with (
        running_daemon(tmp_path / "koala.db", max_unread=10_000) as daemon,
        daemon.agent_of("south") as south,
        daemon.agent_of("north", agent=deaf) as north,
    ):
        for name, agent in (("north", north), ("south", south)):
            await connect_agent(daemon, name, agent)
        grid = Grid(daemon, north, south)
        head, tail = await grid.submit_job(1, COUPLED)
        deaf.reads.clear()
        for turn in range(20):
            south.say_to_daemon(
                make_relay(head, tail, words="x" * 900),
                wire.Ask(ident=f"{turn}", what="stat", payload={}, cluster="north"),
            )
        north.say_to_daemon(*(wire.Ask(ident=f"{n}" + "x" * 900, what="nothing", payload={}) for n in range(100)))
        north.say_to_daemon(report_nodes(3))
        await wait_for_state(daemon, "north", ("usable", 3, ""))
        await grid.all_taken_in(south)
        refused = len(received_messages(south, "relay_failed", reason="north does not read what it is sent"))
        assert 0 < refused < 20
        deaf.reads.set()
        await wait_for_job(lambda: len(received_messages(north, "relay")) == 20 - refused)
        assert len(received_messages(north, "answer")) < 15
        south.say_to_daemon(make_relay(head, tail, words="again"))
        await wait_for_job(lambda: received_messages(north, "relay", payload={"words": "again"}))
