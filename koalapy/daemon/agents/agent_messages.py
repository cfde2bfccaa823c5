"""Dispatch the messages of agents: events to the scheduler, output to the store, relays to other agents."""

import asyncio
import base64
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, get_args

import structlog

from koalapy.daemon.agents.budgets import Use
from koalapy.daemon.agents.questions import Questions
from koalapy.daemon.agents.session import Session, Sessions
from koalapy.daemon.agents.streams import Streams
from koalapy.daemon.auth.login import Logins
from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.daemon.jobs.output import Outputs
from koalapy.daemon.observability.audit import REFUSED, Audit
from koalapy.model.job import Component, Job, is_same_attempt
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory, StageStatus
from koalapy.model.request import ClusterName
from koalapy.protocol.messages import (
    Ack,
    Answer,
    Ask,
    Confirmed,
    FromAgent,
    Hello,
    Output,
    OutputAck,
    RejectedRunner,
    Relay,
    RelayFailed,
    RelayState,
    RenewLease,
    StreamFromNode,
    Vouch,
    Vouched,
)
from koalapy.scheduler.events import ClusterConfirmed, Event, InventoryReceived, Reported
from koalapy.store.records import OutputPiece
from koalapy.system.event_loop import BackgroundTasks

log = structlog.get_logger()

MAX_COUNTED_STAGES = 10_000
MAX_LOGINS_AT_ONCE = 100
"""Logins of the accounts of one cluster that are under way."""


class TransferFeedback:
    """Passes on the results of finished transfers.

    ``moved`` receives source, target, bytes and seconds, for the bandwidth of the link. ``spoiled`` receives name,
    cluster and error of a replica that differs from the catalogue, and returns events for the scheduler. ``counted``
    receives the whole of each transfer, for metrics.
    """

    def __init__(
        self,
        moved: Callable[[ClusterName, ClusterName, int, float], None],
        spoiled: Callable[[str, ClusterName, str], tuple[Event, ...]],
        counted: Callable[[ClusterName, ClusterName, int, float], None] = lambda *_: None,
    ) -> None:
        self._moved, self._spoiled, self._note = moved, spoiled, counted
        self._counted: dict[str, None] = {}
        """Stages with counted transfers: every inventory reports them again."""

    def note_transfers(self, job: Job, component: Component, status: StageStatus) -> tuple[Event, ...]:
        """Return the events that the scheduler needs before the report of the stage."""
        files = list(zip(job.spec.inputs_of(component.request_index), component.sources, strict=False))
        if status.state == "failed" and status.fault == "file":
            if (status.file, status.source) not in {(file.name, source) for file, source in files}:
                return ()
            return self._spoiled(status.file, status.source, status.error)
        # The previous daemon run has counted stages that ended before this one started.
        if status.state == "done" and component.staged_at is None and status.token not in self._counted:
            self._counted[status.token] = None
            if len(self._counted) > MAX_COUNTED_STAGES:
                del self._counted[next(iter(self._counted))]
            sources = {source for _, source in files}
            for moved in status.moved:
                if moved.source in sources:
                    self._moved(moved.source, component.cluster, moved.flowed, moved.flowing)
                    self._note(moved.source, component.cluster, moved.size, moved.seconds)
        return ()


class AgentMessages:
    """The handlers of agents' messages. A session may only report on its own cluster."""

    def __init__(
        self,
        engine: Engine,
        outputs: Outputs,
        sessions: Sessions,
        questions: Questions,
        streams: Streams,
        feedback: TransferFeedback | None = None,
        logins: Logins | None = None,
        audit: Audit | None = None,
        note_relay: Callable[[ClusterName, RelayState | None], None] = lambda *_: None,
    ) -> None:
        """``note_relay``: records whether a site can be reached by relays; None: its agent has not said yet."""
        self.note_relay = note_relay
        self._engine, self._queries, self._outputs, self._sessions = engine, engine.queries, outputs, sessions
        self._feedback, self._logins, self._audit = feedback, logins, audit
        self._tasks: defaultdict[ClusterName, BackgroundTasks] = defaultdict(BackgroundTasks)
        self._handlers: dict[type, Callable[[Session, Any], None]] = {
            Inventory: self._handle_inventory,
            ClusterReport: self._handle_report,
            ComponentStatus: self._handle_report,
            StageStatus: self._handle_stage_status,
            Ack: self._handle_ack,
            Relay: self._handle_relay,
            Confirmed: self._handle_confirmation,
            Vouch: self._handle_vouch,
            RenewLease: self._renew_lease,
            RejectedRunner: self._handle_rejected_runner,
            RelayState: lambda session, message: note_relay(session.cluster, message),
            Ask: lambda session, message: questions.forward_question(session.cluster, message),
            Answer: lambda session, message: questions.deliver_answer(session.cluster, message),
            **dict.fromkeys(get_args(StreamFromNode), streams.receive_message),
        }
        unhandled = {*get_args(get_args(FromAgent)[0])} - self._handlers.keys() - {Hello, Output}
        assert not unhandled, f"messages of agents without a handler: {unhandled}"

    async def handle_messages(self, session: Session, messages: Iterable[FromAgent]) -> None:
        """Handle messages in order. Raise ``StoreUnavailable`` if the database does not answer about output."""
        for kind, same in groupby(messages, type):
            if kind is Output:
                await self._store_output(session, [message for message in same if isinstance(message, Output)])
            elif (handler := self._handlers.get(kind)) is not None:
                began = time.thread_time()
                for message in same:
                    handler(session, message)
                self._sessions.budgets.spend(session.cluster, Use.PROCESSOR, time.thread_time() - began)

    def _handle_inventory(self, session: Session, inventory: Inventory) -> None:
        """Pass an agent's inventory to the scheduler; once that is stored, start to send the agent its commands."""
        open_commands = self._engine.outbox.count_open(session.cluster)
        self._sessions.budgets.spend(session.cluster, Use.MESSAGES, open_commands)
        spoiled = [event for stage in inventory.stages for event in self._note_transfers(session, stage)]
        if spoiled:
            self._engine.post(WorkItem(events=tuple(spoiled)))

        def start_session(forgotten: Sequence[dict[str, Any]]) -> None:
            session.start_sending(
                [*forgotten, *self._engine.outbox.pending_messages(session.cluster, self._engine.epoch)]
            )

        def make_events() -> tuple[Event, ...]:
            undelivered = self._engine.outbox.undelivered_submits(session.cluster)
            return (InventoryReceived(session.cluster, inventory, undelivered),)

        self._engine.post(WorkItem(prepare=make_events, start_session=start_session, inventory_of=session.cluster))

    def _handle_report(self, session: Session, report: ClusterReport | ComponentStatus) -> None:
        self._engine.post(WorkItem(events=(Reported(session.cluster, report),)))

    def _handle_confirmation(self, session: Session, message: Confirmed) -> None:
        if message.clock is not None:
            session.clock_offset = message.clock - time.time()
        if (as_of := session.take_confirmation(message.sequence)) is not None:
            self._engine.post(WorkItem(events=(ClusterConfirmed(session.cluster, as_of),)))

    def _renew_lease(self, session: Session, message: RenewLease) -> None:
        """Renew the lease of an agent's components, unless another daemon may count on their end."""
        if self._engine.database.may_renew_components:
            session.renew_lease(message.number)

    def _handle_rejected_runner(self, session: Session, message: RejectedRunner) -> None:
        """Log and audit an agent's rejection of a process as runner. Ignore reports on components of other clusters."""
        if not self._sessions.budgets.may_log(session.cluster):
            return
        component_entry = self._queries.find(message.token)
        if component_entry is None or component_entry[1].cluster != session.cluster:
            log.warning(
                "agent reported on another's job",
                action="agent-oversteps",
                cluster=session.cluster,
                token=message.token,
            )
            return
        log.warning(
            "a process that claimed to be a job's runner was rejected",
            action="impostor",
            cluster=session.cluster,
            job=component_entry[0].id,
            node=message.node,
            how=message.how,
            address=message.address,
            times=message.times,
        )
        if self._audit is not None:
            how = (
                "without the node's secret"
                if message.how == "forged"
                else "with the node's secret, though it has a runner"
            )
            recording = self._audit.record(
                "impersonate-runner",
                None,
                origin=f"{message.address} on {session.cluster}"[:100],
                target=f"job {component_entry[0].id}",
                outcome=REFUSED,
                detail=f"node {message.node} of {message.token}, {how}, {message.times} times since the last report",
            )
            self._tasks[session.cluster].spawn(recording)

    def _handle_vouch(self, session: Session, message: Vouch) -> None:
        """Log in in the background, so that a slow database does not delay the agent's other messages."""
        if self._logins is None or len(self._tasks[session.cluster].running) >= MAX_LOGINS_AT_ONCE:
            busy = Vouched(ident=message.ident, error="the daemon is busy", hint="try again later")
            session.offer_message(busy)
            return
        self._tasks[session.cluster].spawn(self._log_in(self._logins, session, message))

    async def _log_in(self, logins: Logins, session: Session, message: Vouch) -> None:
        session.offer_message(await logins.handle_vouch(session.cluster, message))

    def _handle_stage_status(self, session: Session, status: StageStatus) -> None:
        self._engine.post(WorkItem(events=(*self._note_transfers(session, status), Reported(session.cluster, status))))

    def _note_transfers(self, session: Session, status: StageStatus) -> tuple[Event, ...]:
        """Record finished transfers of a stage; return events about source replicas that proved bad."""
        staged = self._queries.find_staged(status.token)
        if self._feedback is None or staged is None or staged[1].cluster != session.cluster:
            return ()
        return self._feedback.note_transfers(*staged, status)

    def _handle_ack(self, session: Session, message: Ack) -> None:
        if message.error and self._sessions.budgets.may_log(session.cluster):
            log.warning(
                "an agent rejected a command", action="command-refused", cluster=session.cluster, error=message.error
            )
        self._engine.post(WorkItem(acknowledged=(session.cluster, message.id)))

    async def _store_output(self, session: Session, messages: Iterable[Output]) -> None:
        """Store new output and acknowledge it, with 0 if it could not be stored: the agent sends it again."""
        pieces: dict[str, list[OutputPiece]] = {}
        for message in messages:
            piece = OutputPiece(message.offset, base64.b64decode(message.data), message.gap)
            pieces.setdefault(message.token, []).append(piece)
        ends = await asyncio.gather(
            *(self._outputs.store_pieces(session.cluster, *component_pieces) for component_pieces in pieces.items())
        )
        acks = zip(pieces, ends, strict=True)
        for token, end in acks:
            if end is not None:
                session.offer_message(OutputAck(token=token, offset=end))

    def _handle_relay(self, session: Session, message: Relay) -> None:
        """Relay a message between runners of one attempt, if it comes from the sender's cluster."""
        target = self._target_of(session, message)
        if isinstance(target, Session):
            if target.offer_message(message):
                return
            target = f"{target.cluster} does not read what it is sent"
        session.offer_message(RelayFailed(token=message.sender, node=message.sender_node, reason=target))

    def _target_of(self, session: Session, message: Relay) -> Session | str:
        """Return the session of the agent that receives a relayed message, or why it cannot be delivered."""
        find, cluster = self._queries.find, session.cluster
        sender, target = find(message.sender), find(message.token)
        if sender is None or sender[1].cluster != cluster:
            if self._sessions.budgets.may_log(session.cluster):
                log.warning(
                    "agent relayed for another's runner",
                    action="agent-oversteps",
                    cluster=cluster,
                    sender=message.sender,
                )
            return "not from a component of a live attempt"
        if target is None or not is_same_attempt(message.sender, message.token):
            return "not to a component of the same attempt"
        cluster = target[1].cluster
        return self._sessions.get(cluster) or f"{cluster} is out of reach"
