"""Accept the connections of agents and end those of agents that do not answer."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import structlog
from pydantic import ValidationError

from koalapy import __version__
from koalapy.daemon.agents.agent_messages import AgentMessages
from koalapy.daemon.agents.budgets import Use, count_messages
from koalapy.daemon.agents.questions import Questions
from koalapy.daemon.agents.session import MAX_UNREAD, Connection, Session, Sessions
from koalapy.daemon.agents.streams import Streams
from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.model.errors import ConflictError, StoreUnavailable, UsageError
from koalapy.model.job import JobId
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import ClusterName
from koalapy.protocol.frames import MAX_HELLO_SIZE
from koalapy.protocol.messages import PROTOCOL, FromAgent, Hello, KnownDaemon, Welcome, from_agent
from koalapy.scheduler.events import AgentConnected, ClusterDisconnected
from koalapy.system.event_loop import BackgroundTasks

log = structlog.get_logger()

MAX_EPOCHS_AHEAD = 1000
"""The most by which all agents together may raise the epoch during one daemon run. A restored database is hardly older,
and a lying agent does little harm."""
MEMORY_HINT = "if that is right, empty the agent's directory once nothing of it runs"
BATCH_SIZE = 200
"""Messages of a frame that are handled together; the agent may have to wait before more of them are."""
HELLO_TIMEOUT = 30.0
"""Timeout of an agent's first message."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected connection of a cluster's agent."""

    reason: str
    remedy: str
    rejected_at: float


@dataclass(frozen=True, slots=True)
class AgentDetails:
    """A connected agent, or why the last agent of the cluster is not connected."""

    hello: Hello | None = None
    """The first message of the connected agent; None without one."""
    connected_at: float | None = None
    clock_offset: float | None = None
    """Seconds by which its clock is ahead of the daemon's; None if unknown."""
    rejection: Rejection | None = None
    """The last rejected connection, without a connected agent."""

    @property
    def comparison(self) -> str:
        """Return ``same``, ``older`` or ``newer`` than the daemon's version; ``other`` if it cannot be compared."""
        return compare_versions(self.hello.version if self.hello else "", __version__)


def compare_versions(version: str, with_version: str) -> str:
    """Return whether a version is the ``same`` as another, ``older`` or ``newer``, or cannot be compared: ``other``."""
    if version == with_version:
        return "same"
    try:
        first, second = ([int(part) for part in text.split(".")] for text in (version, with_version))
    except ValueError:
        return "other"
    return "older" if first < second else "newer"


class OtherProtocol(UsageError):
    """The error of an agent with another protocol version."""


class Hub:
    """The connections of all agents."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        messages: AgentMessages,
        questions: Questions,
        streams: Streams,
        welcome: Welcome,
        *,
        unreachable_after: float,
        number_above: Callable[[JobId], bool] = lambda job: True,
        max_unread: int = MAX_UNREAD,
        profiles: Mapping[ClusterName, ClusterProfile] = MappingProxyType({}),
    ) -> None:
        """``welcome``: the answer to each hello, with the present epoch.

        ``number_above`` numbers new jobs above one that an agent knows, or returns False if it is too far.
        ``max_unread``: characters that may wait for one agent that does not read. ``profiles``: those of the
        configuration.
        """
        self._engine, self._profiles, self._max_unread = engine, profiles, max_unread
        self._sessions, self._messages, self._questions = sessions, messages, questions
        self._streams = streams
        self._welcome = welcome
        self._timeout = unreachable_after
        self._budgets = sessions.budgets
        self._agent_memory = AgentMemory(engine, welcome.instance, welcome.life, number_above)
        self.rejections: dict[ClusterName, Rejection] = {}
        """The last rejected connection by cluster, of clusters without an agent."""
        self.incompatible: dict[ClusterName, str] = {}
        """The reason why the last agent was incompatible by cluster, of clusters without an agent."""
        self._tasks = BackgroundTasks()

    def note_rejection(self, cluster: ClusterName, reason: str, remedy: str) -> None:
        """Store why a connection was rejected, for the alert that the cluster has no agent."""
        if self._sessions.get(cluster) is None:
            self.rejections[cluster] = Rejection(reason, remedy, self._engine.clock())

    def describe_agent(self, cluster: ClusterName) -> AgentDetails:
        """Return the connected agent of a cluster, or why its last connection was rejected."""
        session = self._sessions.get(cluster)
        if session is None:
            return AgentDetails(rejection=self.rejections.get(cluster))
        return AgentDetails(session.hello, session.connected_at, session.clock_offset)

    async def close(self) -> None:
        """Close all connections; agents reconnect when the daemon runs again."""
        self._streams.shut_down()
        await self._sessions.close()

    # For the WebSocket route

    def accepts_connection(self, cluster: ClusterName) -> bool:
        """Count a connection of a cluster's agent; return whether its budget allows it."""
        return self._budgets.try_to_spend(cluster, Use.CONNECTIONS)

    def may_log(self, cluster: ClusterName) -> bool:
        """Count a log line about a cluster's agent; return whether its budget allows it."""
        return self._budgets.may_log(cluster)

    async def serve_connection(self, cluster: str, connection: Connection) -> None:
        """Serve a connection of a configured cluster's agent from its hello to its end."""
        frames = connection.frames()
        try:
            hello = await self._receive_hello(cluster, frames)
            self._check_identity(cluster, hello)
            session = Session(cluster, connection, hello, self._max_unread)
            await self._reject_second(session)
            await self._agent_memory.raise_numbers(cluster, hello.known)
            await self._reject_second(session)  # another agent may have connected during the await
        except (ConflictError, UsageError, StoreUnavailable) as error:
            if self._budgets.may_log(cluster):
                log.warning("agent rejected", action="agent-rejected", cluster=cluster, error=error.message)
            self.note_rejection(cluster, error.message, error.hint)
            if isinstance(error, OtherProtocol) and self._sessions.get(cluster) is None:
                self.incompatible[cluster] = error.message
            await connection.close(error.message)
            return
        earlier = self._sessions.get(cluster)
        if earlier is not None:
            self._end_session(
                earlier, reason := "its agent has connected anew", self._engine.clock() - earlier.heard_ago
            )
            self._hang_up(earlier, reason)
        self._sessions.add(session)
        self.incompatible.pop(cluster, None)
        self.rejections.pop(cluster, None)
        if self._budgets.may_log(cluster):
            host, version = hello.host, hello.version
            log.info("agent connected", action="agent-connected", cluster=cluster, host=host, version=version)
        self._engine.post(WorkItem(events=(AgentConnected(cluster),)))
        session.queue_messages([self._welcome.model_copy(update={"epoch": self._engine.epoch})])
        pump = asyncio.create_task(session.send_queued())
        pump.add_done_callback(lambda pump: self._sending_ended(session, pump))
        watch = asyncio.create_task(self._disconnect_when_silent(session))
        try:
            await self._receive_messages(session, frames)
        except StoreUnavailable as error:
            log.error(
                "the database did not answer an agent's connection",
                action="agent-connection-failed",
                cluster=cluster,
                error=str(error),
            )
            await connection.close("the database does not answer: connect again")
        finally:
            pump.cancel()
            watch.cancel()
            session.release_waiters()
            self._end_session(session, "its agent is not connected")

    def _check_identity(self, cluster: ClusterName, hello: Hello) -> None:
        """Raise ``ConflictError`` if the agent has other accounts than the daemon assumes, accepts no scripts, or runs
        no container images."""
        expected_identity = self._engine.queries.accounts.identity_of(cluster)
        if hello.identity != expected_identity:
            raise ConflictError(
                f"clusters.{cluster}.identity is {expected_identity} for the daemon and {hello.identity[:20]} for its"
                " agent: give both the same configuration"
            )
        profile = self._profiles.get(cluster, ClusterProfile())
        runtime = profile.container_runtime
        if runtime and hello.container_runtime not in (None, runtime):
            raise ConflictError(
                f"clusters.{cluster}.container_runtime is {runtime} for the daemon and "
                f"{hello.container_runtime[:20] or 'not set'} for its agent: give both the same configuration"
            )
        if profile.accepts_scripts and hello.accepts_scripts is False:
            raise ConflictError(
                f"clusters.{cluster}.accepts_scripts is true for the daemon and false for its agent: "
                "give both the same configuration"
            )

    async def _reject_second(self, session: Session) -> None:
        """Raise ``ConflictError`` if another agent of the cluster answers. The same one may reconnect."""
        while (
            earlier := self._sessions.get(session.cluster)
        ) is not None and earlier.process_and_host != session.process_and_host:
            if earlier.hangs:
                return
            answers = await earlier.answers_probe(self._timeout)
            if self._sessions.get(session.cluster) is not earlier:
                continue
            if answers:
                raise ConflictError(
                    f"cluster {session.cluster} has an agent already, {earlier.process_and_host}: stop one of them"
                )

    def _sending_ended(self, session: Session, pump: "asyncio.Task[None]") -> None:
        """Close the connection if sending failed, so that the agent reconnects."""
        error = None if pump.cancelled() else pump.exception()
        if error is not None:
            log.error(
                "cannot send to an agent", action="agent-connection-failed", cluster=session.cluster, exc_info=error
            )
            self._hang_up(session, "the daemon failed to send: connect again")

    def _hang_up(self, session: Session, reason: str) -> None:
        """Close a connection in the background, since that may take long on a dead one."""
        self._tasks.spawn(session.connection.close(reason))

    async def _disconnect_when_silent(self, session: Session) -> None:
        """Disconnect the agent once it stops answering or reading: it may be stopped, or its host unreachable."""
        problem = await session.wait_until_silent(self._timeout)
        heard = self._engine.clock() - session.heard_ago
        self._end_session(session, f"its agent {problem}", heard)
        self._hang_up(session, "no answer: connect again")

    async def _receive_messages(self, session: Session, frames: AsyncIterator[str]) -> None:
        """Handle a session's messages until it ends or is replaced. Close the connection at the first invalid one."""
        async for frame in session.receive_frames(frames):
            await self._budgets.await_allowance(session.cluster)  # an earlier connection may have spent it
            if self._sessions.get(session.cluster) is not session:
                return  # disconnected or replaced: the agent repeats its messages after it reconnects
            try:
                messages = self._parse_frame(session.cluster, frame)
            except ValidationError as error:
                wrong = error.errors(include_url=False, include_input=False)[0]
                text = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"[:300]
                if self._budgets.may_log(cluster := session.cluster):
                    log.error(
                        "invalid message from an agent", action="agent-message-invalid", cluster=cluster, error=text
                    )
                await session.connection.close(f"a message is invalid: {text}")
                return
            for start in range(0, len(messages), BATCH_SIZE):
                batch = messages[start : start + BATCH_SIZE]
                self._budgets.spend(session.cluster, Use.MESSAGES, count_messages(batch))
                await self._messages.handle_messages(session, batch)
                await self._budgets.await_allowance(session.cluster)
                if self._sessions.get(session.cluster) is not session:
                    return

    def _parse_frame(self, cluster: ClusterName, frame: str) -> list[FromAgent]:
        """Return the messages of a frame, and count it. Raise ``ValidationError`` if it is invalid."""
        began = time.thread_time()
        try:
            return from_agent.validate_json(frame)
        finally:
            self._budgets.spend(cluster, Use.BYTES, len(frame))
            self._budgets.spend(cluster, Use.PROCESSOR, time.thread_time() - began)

    async def _receive_hello(self, cluster: ClusterName, frames: AsyncIterator[str]) -> Hello:
        """Return the hello of a connection. Raise ``UsageError`` if another message or none arrives."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT):
                async for frame in frames:
                    return self._parse_hello(cluster, frame)
        except TimeoutError as error:
            raise UsageError(f"the agent sent no hello within {HELLO_TIMEOUT:g} s") from error
        raise UsageError("the connection ended before a hello")

    def _parse_hello(self, cluster: ClusterName, frame: str) -> Hello:
        """Return the hello in a frame. Raise ``UsageError`` without one, ``OtherProtocol`` for another version."""
        if len(frame) > MAX_HELLO_SIZE:
            raise UsageError(f"the agent's first message has {len(frame)} characters, the limit is {MAX_HELLO_SIZE}")
        try:
            messages = self._parse_frame(cluster, frame)
        except ValidationError as error:
            raise UsageError(
                f"the agent's first message is invalid ({error.errors()[0]['msg']}): "
                "update the agent to the daemon's version"
            ) from error
        first = messages[0] if messages else None
        if not isinstance(first, Hello):
            raise UsageError("the first message must be a hello")
        if first.protocol != PROTOCOL:
            raise OtherProtocol(f"the agent speaks protocol {first.protocol}, the daemon {PROTOCOL}: update the older")
        return first

    def _end_session(self, session: Session, reason: str, heard: float | None = None) -> None:
        """Report to the scheduler that an agent is disconnected, unless a newer session of its cluster exists."""
        if self._sessions.remove(session):
            self._questions.fail_questions(session.cluster)
            self._streams.end_streams_of(session.cluster, reason)
            self._messages.note_relay(session.cluster, None)
            if self._budgets.may_log(session.cluster):
                log.info("agent disconnected", action="agent-disconnected", cluster=session.cluster, reason=reason)
            self._engine.post(WorkItem(events=(ClusterDisconnected(session.cluster, reason, heard),)))


class AgentMemory:
    """Epochs and job numbers that agents know, which a database restored from a backup may not.

    Raises those of the daemon above them before anything is sent to agents.
    """

    def __init__(self, engine: Engine, instance: str, life: str, number_above: Callable[[JobId], bool]) -> None:
        self._engine, self._number_above = engine, number_above
        self._instance, self._run_id = instance, life
        self._max_epoch = engine.epoch + MAX_EPOCHS_AHEAD
        self._seen_clusters: set[ClusterName] = set()
        self._raised_clusters: set[ClusterName] = set()
        """Clusters for which the epoch was raised; each may do so once."""

    async def raise_numbers(self, cluster: ClusterName, known_daemons: Sequence[KnownDaemon]) -> None:
        """Raise the epoch (the number of the daemon run) and job numbers above those that an agent knows.

        Raise ``UsageError`` if the agent's numbers are implausible.
        """
        daemon = next((daemon for daemon in known_daemons if daemon.instance == self._instance), None)
        is_first = cluster not in self._seen_clusters
        if daemon is None:
            self._seen_clusters.add(cluster)
            return
        if daemon.epoch > self._engine.epoch or (daemon.epoch == self._engine.epoch and daemon.life != self._run_id):
            await self._raise_epoch(cluster, daemon.epoch)
        # After the first connection it can only know numbers of this daemon run.
        if is_first and not self._number_above(daemon.job):
            raise UsageError(
                f"the agent of {cluster} knows job {daemon.job}, far above all jobs of the daemon: {MEMORY_HINT}",
                hint=f"if its number is right, set first_job_number: {daemon.job + 1} in the daemon's configuration",
            )
        self._seen_clusters.add(cluster)

    async def _raise_epoch(self, cluster: ClusterName, epoch: int) -> None:
        """Raise the daemon's epoch, the number of its run, above the ``epoch`` that a cluster's agent knows.

        Raise ``UsageError`` if the cluster did so before or its epoch is implausible.
        """
        daemon_epoch = self._engine.epoch
        if cluster in self._raised_clusters or epoch > self._max_epoch:
            raise UsageError(
                f"the agent of {cluster} knows epoch {epoch}, and the daemon's is {daemon_epoch}: {MEMORY_HINT}"
            )
        self._raised_clusters.add(cluster)
        try:
            await self._engine.commit(WorkItem(epoch=epoch + 1))
        except StoreUnavailable:
            self._raised_clusters.discard(cluster)
            raise
        log.warning(
            "the database is older than what an agent knows: it was restored from a backup",
            action="database-restored",
            cluster=cluster,
            epoch=daemon_epoch,
            known=epoch,
        )
