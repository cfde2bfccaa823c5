"""The daemon's side of the agents' connections."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import structlog
from pydantic import ValidationError

from koalapy.model.errors import ConflictError, StoreUnavailable, UsageError
from koalapy.model.job import JobId, of_one_attempt
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory, StageStatus
from koalapy.model.request import ClusterName
from koalapy.ports import OutputPiece
from koalapy.protocol import messages as wire
from koalapy.scheduling.events import ClusterConfirmed, ClusterDisconnected, Event, Reported
from koalapy.service.agent_memory import AgentMemory
from koalapy.service.engine import Engine, Item, inventory_item
from koalapy.service.output import Outputs
from koalapy.service.questions import Questions
from koalapy.service.session import Connection, Session

log = structlog.get_logger()

MAX_COUNTED_STAGES = 10_000
HELLO_TIMEOUT = 30.0
"""Seconds that an agent has to say who it is."""


@dataclass(frozen=True, slots=True)
class TransferFeedback:
    """Who learns from transfers that are over."""

    moved: Callable[[ClusterName, ClusterName, int, float], None]
    """So many bytes came from one cluster to another in so many seconds."""
    spoiled: Callable[[str, ClusterName, str], tuple[Event, ...]]
    """A replica is not what the catalogue says, by its name, cluster and fault; what the scheduler is to know of it."""


class Hub:
    """Lets agents in, turns what they say into events, and sends them their commands."""

    def __init__(
        self,
        engine: Engine,
        outputs: Outputs,
        *,
        instance: str,
        life: str,
        lease: float,
        output_limit: int,
        unreachable_after: float,
    ) -> None:
        """``life`` tells this daemon from every other of the same instance."""
        self._engine = engine
        self._outputs = outputs
        self._lease = lease
        self._output_limit = output_limit
        self._patience = unreachable_after
        self._agent_memory = AgentMemory(engine, instance, life)
        self._sessions: dict[str, Session] = {}
        self._awaited: frozenset[ClusterName] = frozenset()
        """Clusters for whose nodes jobs wait."""
        self._hanging_up: set[asyncio.Task[None]] = set()
        self.questions = Questions(self._tell)
        self.feedback: TransferFeedback | None = None
        self._counted: dict[str, None] = {}
        """Stages whose transfers were counted: they are told again in every inventory."""

    def number_above(self, number: Callable[[JobId], bool]) -> None:
        """Have new jobs get numbers above those that agents know; ``number`` says False when one is too far."""
        self._agent_memory.number_above = number

    # For the engine

    def send(self, cluster: str, messages: Iterable[dict[str, Any]]) -> None:
        session = self._sessions.get(cluster)
        if session is not None and session.ready:
            session.put(messages)

    def confirm(self, cluster: str) -> None:
        session = self._sessions.get(cluster)
        if session is not None and session.ready:
            session.ask_to_confirm(self._engine.clock())

    def jobs_wait_for(self, clusters: frozenset[ClusterName]) -> None:
        changed, self._awaited = clusters ^ self._awaited, clusters
        for cluster in changed:
            if (session := self._sessions.get(cluster)) is not None:
                session.jobs_wait(awaited=cluster in clusters)

    def _tell(self, cluster: str, message: wire.Ask | wire.Answer) -> bool:
        session = self._sessions.get(cluster)
        return session is not None and session.offer(message)

    async def close(self) -> None:
        """Hang up on every agent; they come back when the daemon does."""
        for session in list(self._sessions.values()):
            await session.connection.close("the daemon is shutting down")

    # For the WebSocket route

    async def serve(self, cluster: str, connection: Connection) -> None:
        """One agent's connection, from its hello to its end; the cluster is one that is configured."""
        frames = connection.frames()
        try:
            hello = await _hello(frames)
            session = Session(cluster, connection, hello)
            await self._make_way(session)
            await self._agent_memory.outgrow(cluster, hello.known)
            await self._make_way(session)  # a third may have been faster
        except (ConflictError, UsageError, StoreUnavailable) as error:
            log.warning("agent refused", action="refuse", cluster=cluster, error=error.message)
            await connection.close(error.message)
            return
        earlier = self._sessions.get(cluster)
        if earlier is not None:
            self._leave(earlier, reason := "its agent has connected anew", self._engine.clock() - earlier.silence)
            self._hang_up(earlier, reason)
        self._sessions[cluster] = session
        log.info("agent connected", action="connect", cluster=cluster, host=hello.host, version=hello.version)
        session.put([self._agent_memory.welcome(self._lease, self._output_limit)])
        pump = asyncio.create_task(session.pump())
        pump.add_done_callback(lambda pump: self._pumped(session, pump))
        watch = asyncio.create_task(self._watch(session))
        try:
            await self._listen(session, frames)
        except StoreUnavailable as error:
            log.error(
                "the database did not answer an agent's connection",
                action="disconnect",
                cluster=cluster,
                error=str(error),
            )
            await connection.close("the database does not answer: connect again")
        finally:
            pump.cancel()
            watch.cancel()
            session.end()
            self._leave(session, "its agent is not connected")

    async def _make_way(self, session: Session) -> None:
        """``ConflictError`` when another agent of the cluster is connected, and answers; the same one may come anew."""
        while (earlier := self._sessions.get(session.cluster)) is not None and earlier.who != session.who:
            if earlier.hangs:
                return
            answers = await earlier.answers(self._patience)
            if self._sessions.get(session.cluster) is not earlier:
                continue
            if answers:
                raise ConflictError(f"cluster {session.cluster} has an agent already, {earlier.who}: stop one of them")

    def _pumped(self, session: Session, pump: "asyncio.Task[None]") -> None:
        """Nothing more would ever be sent, and the agent would never know: it is to connect again."""
        error = None if pump.cancelled() else pump.exception()
        if error is not None:
            log.error("cannot send to an agent", action="disconnect", cluster=session.cluster, exc_info=error)
            self._hang_up(session, "an error of the daemon's: connect again")

    def _hang_up(self, session: Session, reason: str) -> None:
        """Not waited for: on a connection that is dead it may take long."""
        hanging_up = asyncio.create_task(session.connection.close(reason))
        self._hanging_up.add(hanging_up)
        hanging_up.add_done_callback(self._hanging_up.discard)

    async def _watch(self, session: Session) -> None:
        """Give an agent up that does not answer, though its connection is open: it may be stopped, or its host gone."""
        await session.silent(self._patience)
        heard = self._engine.clock() - session.silence
        self._leave(session, f"its agent has not answered for {session.silence:g} s", heard)
        self._hang_up(session, "no answer: connect again")

    async def _listen(self, session: Session, frames: AsyncIterator[str]) -> None:
        handlers: dict[type, Callable[[Session, Any], Awaitable[None] | None]] = {
            Inventory: self._inventory,
            ClusterReport: self._reported,
            ComponentStatus: self._reported,
            StageStatus: self._stage_status,
            wire.Ack: self._ack,
            wire.Relay: self._relay,
            wire.Confirmed: self._confirmed,
            wire.Ask: lambda session, message: self.questions.asked(session.cluster, message),
            wire.Answer: lambda session, message: self.questions.answered(session.cluster, message),
        }
        async for frame in session.listen(frames):
            if self._sessions.get(session.cluster) is not session:
                return  # given up, or replaced: whatever it says, it will say again
            try:
                messages = wire.from_agent.validate_json(frame)
            except ValidationError as error:
                wrong = error.errors(include_url=False, include_input=False)[0]
                said = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"[:300]
                log.error("agent speaks nonsense", action="disconnect", cluster=session.cluster, error=said)
                await session.connection.close(f"a message could not be understood: {said}")
                return
            for kind, same in groupby(messages, type):
                if kind is wire.Output:
                    await self._output(session, [m for m in same if isinstance(m, wire.Output)])
                    continue
                for message in same:
                    handler = handlers.get(kind)
                    waits = handler(session, message) if handler else None
                    if waits is not None:
                        await waits

    def _leave(self, session: Session, reason: str, heard: float | None = None) -> None:
        if self._sessions.get(session.cluster) is session:
            del self._sessions[session.cluster]
            self.questions.lost(session.cluster)
            log.info("agent disconnected", action="disconnect", cluster=session.cluster, reason=reason)
            self._engine.post(Item(events=(ClusterDisconnected(session.cluster, reason, heard),)))

    def _inventory(self, session: Session, inventory: Inventory) -> None:
        spoiled = [event for stage in inventory.stages for event in self._learn(session, stage)]
        if spoiled:
            self._engine.post(Item(events=tuple(spoiled)))

        def greet(forgotten: Sequence[dict[str, Any]]) -> None:
            session.ready = True
            session.jobs_wait(awaited=session.cluster in self._awaited)
            session.put([*forgotten, *self._engine.outbox.of(session.cluster, self._engine.epoch)])

        self._engine.post(inventory_item(self._engine, session.cluster, inventory, greet))

    def _reported(self, session: Session, report: ClusterReport | ComponentStatus) -> None:
        self._engine.post(Item(events=(Reported(session.cluster, report),)))

    def _confirmed(self, session: Session, message: wire.Confirmed) -> None:
        if (as_of := session.confirmed(message.sequence)) is not None:
            self._engine.post(Item(events=(ClusterConfirmed(session.cluster, as_of),)))

    def _stage_status(self, session: Session, status: StageStatus) -> None:
        self._engine.post(Item(events=(*self._learn(session, status), Reported(session.cluster, status))))

    def _learn(self, session: Session, message: StageStatus) -> tuple[Event, ...]:
        """What is to be known beside the stage itself, before it."""
        if self.feedback is None:
            return ()
        found = self._engine.scheduler.find_staged(message.token)
        if found is None or found[1].cluster != session.cluster:
            return ()
        files = list(zip(found[0].spec.inputs_of(found[1].request_index), found[1].sources, strict=False))
        if message.state == "failed" and message.fault == "file":
            if (message.file, message.source) not in {(file.name, source) for file, source in files}:
                return ()
            return self.feedback.spoiled(message.file, message.source, message.error)
        # A stage that had come before this daemon began was learned from by the one before it.
        if message.state == "done" and found[1].staged_at is None and message.token not in self._counted:
            self._counted[message.token] = None
            if len(self._counted) > MAX_COUNTED_STAGES:
                del self._counted[next(iter(self._counted))]
            sources = {source for _, source in files}
            for moved in message.moved:
                if moved.source not in sources:
                    continue
                self.feedback.moved(moved.source, session.cluster, moved.flowed, moved.flowing)
        return ()

    def _ack(self, session: Session, message: wire.Ack) -> None:
        if message.error:
            log.warning("agent refused a command", action="refused", cluster=session.cluster, error=message.error)
        self._engine.post(Item(acknowledged=(session.cluster, message.id)))

    async def _output(self, session: Session, messages: Iterable[wire.Output]) -> None:
        """Keep what is new of it, and tell the agent how far it is kept; what cannot be kept now comes again."""
        pieces: dict[str, list[OutputPiece]] = {}
        for message in messages:
            piece = OutputPiece(message.offset, base64.b64decode(message.data), message.gap)
            pieces.setdefault(message.token, []).append(piece)
        ends = await asyncio.gather(*(self._outputs.take(session.cluster, *each) for each in pieces.items()))
        acks = zip(pieces, ends, strict=True)
        for token, end in acks:
            if end is not None:
                session.offer(wire.OutputAck(token=token, offset=end))

    def _relay(self, session: Session, message: wire.Relay) -> None:
        """Pass something from one runner to another: of the same attempt, and from the cluster of the first only."""
        target = self._target_of(session.cluster, message)
        if isinstance(target, Session):
            if target.offer(message):
                return
            target = f"{target.cluster} does not read what it is sent"
        session.offer(wire.RelayFailed(token=message.sender, node=message.sender_node, reason=target))

    def _target_of(self, cluster: ClusterName, message: wire.Relay) -> Session | str:
        find = self._engine.scheduler.find
        sender, target = find(message.sender), find(message.token)
        if sender is None or sender[1].cluster != cluster:
            log.warning("a relay in another's name", action="refuse", cluster=cluster, sender=message.sender)
            return "not from a component of a live attempt"
        if target is None or not of_one_attempt(message.sender, message.token):
            return "not to a component of the same attempt"
        cluster = target[1].cluster
        return self._sessions.get(cluster) or f"{cluster} is out of reach"


async def _hello(frames: AsyncIterator[str]) -> wire.Hello:
    """The first message of a connection; ``UsageError`` when it is anything else, or does not come."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT):
            return await _first(frames)
    except TimeoutError as error:
        raise UsageError(f"no hello came within {HELLO_TIMEOUT:g} s") from error


async def _first(frames: AsyncIterator[str]) -> wire.Hello:
    async for frame in frames:
        try:
            messages = wire.from_agent.validate_json(frame)
        except ValidationError as error:
            raise UsageError(f"the first message could not be understood: {error.error_count()} errors") from error
        first = messages[0] if messages else None
        if not isinstance(first, wire.Hello):
            raise UsageError("the first message must be a hello")
        if first.protocol != wire.PROTOCOL:
            raise UsageError(
                f"the agent speaks protocol {first.protocol}, the daemon {wire.PROTOCOL}: update the older"
            )
        return first
    raise UsageError("the connection ended before a hello")
