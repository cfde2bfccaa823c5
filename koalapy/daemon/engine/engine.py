"""The engine loop: pass events to the scheduler, write its effects in one transaction, then send commands to agents.

Work items that arrive during a write share the next transaction, so that bursts cost few commits.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from koalapy.daemon.agents.session import Sessions
from koalapy.daemon.agents.wire import CommandMessages, FindRelay
from koalapy.daemon.alerts.notifications import Notifications
from koalapy.daemon.engine.database import DatabaseMonitor
from koalapy.daemon.jobs.changes import Changes, Topic
from koalapy.daemon.observability.audit import AuditedRequest, take_change
from koalapy.daemon.observability.instruments import Instruments
from koalapy.model.cluster import check_cluster
from koalapy.model.errors import KoalaError, StoreUnavailable
from koalapy.model.job import ACTIVE_STATES, Job, JobId, JobState, Token, parse_token
from koalapy.model.notification import Notification
from koalapy.model.replica import Catalogue
from koalapy.model.reports import ClusterReport
from koalapy.model.request import ClusterName
from koalapy.scheduler.effects import MAX_STRAYS, Command, Effects, ForgetComponent, StopComponent, UnstageComponent
from koalapy.scheduler.events import Event, Reported, ReservationChanged
from koalapy.scheduler.scheduler import Scheduler
from koalapy.simulation.record.recorder import RecordedScheduler
from koalapy.store.records import Batch, ClusterRecord, OutboxEntry, Submitted
from koalapy.store.sql import JobStore
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

BATCH_DELAY_S = 0.002
"""Wait after the first work item, so that others share its transaction."""
STEP_YIELD_S = 0.01
"""Pause between two steps while jobs are left to be placed, so that other tasks run."""
TAKE_IN_BUDGET_S = 0.025
"""Processor time in which one cycle applies events; the others wait for the next, so that other tasks run."""
RETRY_INTERVAL_S = 0.5
"""Pause before a failed transaction is retried."""
LAST_WRITE_TIMEOUT_S = 10.0
"""Timeout of a transaction while the daemon ends; after it the daemon ends as if killed."""
WRITER = "engine"


Observer = Callable[[Job, JobState | None], None]
"""Called with a job after a change is stored, and its previous stored state, None if new. Must return quickly."""


@dataclass(slots=True)
class WorkItem:
    """Work for one cycle: events to apply, rows to write with them, and the future of the commit."""

    events: tuple[Event, ...] = ()
    prepare: Callable[[], tuple[Event, ...]] | None = None
    """Returns the events. Called in the loop, where it may read the scheduler; may raise ``KoalaError``."""
    submitted: Submitted | None = None
    acknowledged: tuple[ClusterName, int] | None = None
    """The cluster that acknowledges a command, and the command's id."""
    committed: asyncio.Future[None] | None = None
    after_write: Callable[[], None] | None = None
    """Called after the write."""
    inventory_of: str = ""
    """The cluster with the inventory that this item reports; it becomes ready for commands."""
    start_session: Callable[[Sequence[dict[str, Any]]], None] | None = None
    """Called after the write with the messages that have this cluster forget components."""
    epoch: int = 0
    """Raise the daemon's epoch to this one if it is lower."""
    audited: AuditedRequest | None = None
    """The audit entry of the request, which is stored with the item."""
    decided: bool = False
    """Whether the item follows from stored data, so that it is not rejected while the database is unavailable."""


class Outbox:
    """Written commands that are not acknowledged, by cluster in order; they are sent again when an agent reconnects."""

    def __init__(self, entries: Iterable[OutboxEntry], epoch: int) -> None:
        self._entries: dict[int, OutboxEntry] = {}
        self._open: Counter[ClusterName] = Counter()
        self.add_entries(entries)
        self._next = max(self._entries, default=0) + 1
        self.raise_ids(epoch)

    def raise_ids(self, epoch: int) -> None:
        """Raise the next id, so that no command of an earlier epoch (number of the daemon run) has it."""
        self._next = max(self._next, epoch * 10**9)

    def new_id(self) -> int:
        self._next += 1
        return self._next

    def add_entries(self, entries: Iterable[OutboxEntry]) -> None:
        for entry in entries:
            self._entries[entry.id] = entry
            self._open[entry.cluster] += 1

    def count_open(self, cluster: ClusterName) -> int:
        """Return the number of a cluster's unacknowledged commands."""
        return self._open[cluster]

    def acknowledge_command(self, cluster: ClusterName, ident: int) -> bool:
        """Remove a command. Return False if it was not open or is another cluster's."""
        entry = self._entries.get(ident)
        if entry is None or entry.cluster != cluster:
            return False
        del self._entries[ident]
        self._open[cluster] -= 1
        return True

    def pending_messages(self, cluster: ClusterName, epoch: int) -> Sequence[dict[str, object]]:
        """Return a cluster's unacknowledged commands with the daemon's present epoch, stops first.

        A stop keeps its position if the submission of its component is unacknowledged too.
        """
        submitted = self.undelivered_submits(cluster)
        entries = [entry for entry in self._entries.values() if entry.cluster == cluster]
        entries.sort(key=lambda entry: entry.kind != "stop" or entry.token in submitted)
        return [entry.payload | {"epoch": epoch} for entry in entries]

    def undelivered_submits(self, cluster: ClusterName) -> frozenset[Token]:
        entries = self._entries.values()
        return frozenset(e.token for e in entries if e.cluster == cluster and e.kind == "submit")


class Engine:
    """The owner of the scheduler. All changes pass through it; ``queries`` is the scheduler's read-only side."""

    def __init__(
        self,
        scheduler: Scheduler | RecordedScheduler,
        store: JobStore,
        outbox: Outbox,
        *,
        epoch: int,
        describe: Callable[[str], ClusterRecord],
        clock: Callable[[], float] | None = None,
        catalogue: Catalogue | None = None,
        sessions: Sessions | None = None,
        notifications: Notifications | None = None,
        take_in_budget_s: float = TAKE_IN_BUDGET_S,
        max_strays: int = MAX_STRAYS,
        find_relay: FindRelay = lambda *_: None,
        instruments: Instruments | None = None,
    ) -> None:
        """``max_strays``: commands about unknown components that one cluster's outbox holds at most."""
        self._max_strays, self._find_relay = max_strays, find_relay
        self._take_in_budget_s = take_in_budget_s
        self.catalogue = catalogue or Catalogue()
        self._scheduler = scheduler
        self.queries = scheduler.queries
        self._sessions, self._notifications = sessions, notifications
        self._observers: list[Observer] = [log_change]
        self.outbox = outbox
        self.epoch = epoch
        self.clock = clock or steady_clock()
        self.draining = False
        self.cycle_time = 0.0
        """The time of the current cycle, at which its events happen; that of the last one while the engine is idle."""
        self.cycle_started_at: float | None = None
        """Monotonic time at which the current cycle started; None while the engine is idle."""
        self.database = DatabaseMonitor()
        self.changes = Changes()
        self.instruments = instruments or Instruments()
        self._stored = {job.id: job.state for job in scheduler.queries.jobs()}
        """The stored states of unfinished jobs, and how many have each; the scheduler may be ahead of them."""
        self.stored_counts = Counter(self._stored.values())
        self._store = store
        self._profiles = {cluster.name: cluster.profile for cluster in self.queries.grid.clusters()}
        self._describe = describe
        self._items: deque[WorkItem] = deque()
        self._wake = asyncio.Event()
        self._stopping = False
        self._watchers: dict[JobId, set[asyncio.Event]] = {}
        self._writer = ThreadPoolExecutor(1, "writer")

    def post(self, item: WorkItem) -> None:
        """Queue a work item for the next cycle and return."""
        self._items.append(item)
        self._wake.set()

    async def commit(self, item: WorkItem) -> None:
        """Queue a work item and wait until it is written. Raise the scheduler's error if it rejects the item.

        Raise ``StoreUnavailable`` if it cannot be written; then nothing of it was changed.
        """
        if not item.decided:
            self.database.check_available()
        item.committed = asyncio.get_running_loop().create_future()
        item.audited = take_change()
        self.post(item)
        try:
            await item.committed
        except KoalaError:
            if item.audited is not None:
                item.audited.written = False
            raise

    @property
    def pending_items(self) -> int:
        """The number of work items that wait for the next cycle."""
        return len(self._items)

    @property
    def stored_queued(self) -> int:
        """The number of queued jobs as stored: reading such a job afterwards returns no older state."""
        return self.stored_counts[JobState.QUEUED]

    @property
    def stored_active(self) -> int:
        """The number of placed and unfinished jobs as stored."""
        return sum(self.stored_counts[state] for state in ACTIVE_STATES)

    def check_cluster(self, name: ClusterName, field: str = "") -> None:
        """Raise ``NotFoundError`` if there is no cluster of that name."""
        check_cluster(name, [cluster.name for cluster in self.queries.grid.clusters()], field)

    def subscribe(self, observer: Observer) -> None:
        """Call ``observer`` for each job that has changed."""
        self._observers.append(observer)

    @contextmanager
    def watch(self, job: JobId) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change of a job or its output."""
        changed = asyncio.Event()
        self._watchers.setdefault(job, set()).add(changed)
        try:
            yield changed
        finally:
            self._watchers[job].discard(changed)
            if not self._watchers[job]:
                del self._watchers[job]

    def wake_watchers(self, job: JobId) -> None:
        """Set the events of those that watch a job, after a change of it or its output."""
        for changed in self._watchers.get(job, ()):
            changed.set()

    def drain(self) -> None:
        """Wake all watchers, since the daemon is about to end."""
        self.draining = True
        self.changes.end_followers()
        for watching in self._watchers.values():
            for changed in watching:
                changed.set()

    def stop(self) -> None:
        """End the loop once all queued items are written. ``run`` raises ``StoreUnavailable`` if they cannot be.

        Jobs that the scheduler has not yet considered wait for the next daemon run.
        """
        self._stopping = True
        self._wake.set()

    # The loop

    async def run(self) -> None:
        """Run cycles until ``stop``: wait for items, apply them, step the scheduler, write, send."""
        while not (self._stopping and not self._items):
            await self._wait_for_work()
            self.cycle_started_at = time.monotonic()
            await self._run_cycle()
            self.cycle_started_at = None

    async def _wait_for_work(self) -> None:
        """Wait for work items, the scheduler's next deadline or the end of the engine."""
        if self._scheduler.is_unfinished:
            await asyncio.sleep(STEP_YIELD_S)
            self._wake.clear()
            return
        wakeup = self._scheduler.next_wakeup()
        timeout = None if wakeup is None else max(0.0, wakeup - self.clock())
        if not self._items and not self._stopping:
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                return
            await asyncio.sleep(BATCH_DELAY_S)
        else:
            await asyncio.sleep(0)
        self._wake.clear()

    async def _run_cycle(self) -> None:
        """Run one cycle: apply work items, run the scheduler, store the outcome, and act on it."""
        now, began, rounds, items = self.clock(), time.monotonic(), self.instruments.cycles, list[WorkItem]()
        rounds.waiting = len(self._items)
        self.cycle_time = now
        taken_in_until = time.thread_time() + self._take_in_budget_s
        while self._items:
            item = self._items.popleft()
            if self._apply_item(item, now):
                items.append(item)
            if time.thread_time() >= taken_in_until:
                break
        epoch = max((item.epoch for item in items), default=0)
        if epoch > self.epoch:  # stored first, so that agents reject all earlier commands
            await self._write_with_retries(partial(self._store.raise_epoch, epoch))
            self.epoch = epoch
            self.outbox.raise_ids(epoch)
        effects = self._scheduler.step((), now)
        self.instruments.count_effects(effects)
        for warning in effects.warnings:
            log.error("a policy has a defect", action="policy-broken", error=warning)
        batch, messages = self._build_batch(items, now, effects)
        rounds.step.note(time.monotonic() - began)
        if batch:
            await self._write_with_retries(partial(self._store.write, batch))
        self._finish_cycle(items, effects, batch, messages)
        rounds.total.note(time.monotonic() - began)

    def _apply_item(self, item: WorkItem, now: float) -> bool:
        """Pass the events of a work item to the scheduler.

        Return False if it rejects them; its error goes to the waiter.
        """
        try:
            events = item.prepare() if item.prepare else item.events
            for event in events:
                self._scheduler.apply(event, now)
            self.instruments.count_events(events)
        except KoalaError as error:
            self.instruments.cycles.refused += 1
            if item.committed is not None and not item.committed.done():
                item.committed.set_exception(error)
            else:
                log.warning("the scheduler rejected an event", action="event-refused", error=str(error))
            return False
        return True

    def _build_batch(
        self, items: Sequence[WorkItem], now: float, effects: Effects
    ) -> tuple[Batch, dict[str, list[dict[str, Any]]]]:
        """Return the changes to store in one transaction, and the messages to send after it, by cluster."""
        messages: dict[str, list[dict[str, Any]]] = {}
        entries: list[OutboxEntry] = []
        commands = CommandMessages(
            self.epoch,
            self._profiles,
            self.catalogue,
            self.queries.accounts,
            self.queries.job,
            self._find_relay,
            (lambda _: False) if self._sessions is None else self._sessions.may_ignore_containers,
            self.queries.reservations.site_name,
        )
        for command in self._within_bounds(effects.commands):
            ident = self.outbox.new_id()
            job = self._job_of(command, effects)
            payload = commands.build_message(command, job, ident)
            messages.setdefault(command.cluster, []).append(payload)
            # Needs no outbox: each inventory that still has the component leads to another command.
            if not isinstance(command, ForgetComponent):
                entries.append(OutboxEntry(ident, command.cluster, payload))
        batch = Batch(
            at=now,
            epoch=self.epoch,
            jobs=effects.jobs,
            respecified=effects.respecified,
            attempts=effects.attempts,
            timeline=effects.timeline,
            outbox=entries,
            acknowledged=[
                acknowledged[1]
                for item in items
                if (acknowledged := item.acknowledged) and self.outbox.acknowledge_command(*acknowledged)
            ],
            submitted=[i.submitted for i in items if i.submitted],
            clusters=[self._describe(name) for name in sorted(effects.clusters)],
            advised=effects.advised,
            scans=effects.scans,
            reservations=[e.reservation for item in items for e in item.events if isinstance(e, ReservationChanged)],
            audit=[entry for item in items if item.audited for entry in item.audited.make_entries(now)],
            notifications=self._make_notifications(effects.jobs.values(), now),
        )
        return batch, messages

    def _make_notifications(self, jobs: Iterable[Job], now: float) -> list[Notification]:
        """Return the notifications about changed jobs; none if the daemon sends none."""
        if self._notifications is None:
            return []
        return [
            notification
            for job in jobs
            for notification in self._notifications.make_notifications(job, self._stored.get(job.id), now)
        ]

    def _within_bounds(self, commands: Iterable[Command]) -> Iterator[Command]:
        """Yield commands, but not more than a limit for each cluster about strays: components unknown to the daemon."""
        strays: Counter[ClusterName] = Counter()
        for command in commands:
            if isinstance(command, StopComponent | UnstageComponent) and command.stray:
                strays[command.cluster] += 1
                if self.outbox.count_open(command.cluster) + strays[command.cluster] > self._max_strays:
                    continue
            yield command

    def _job_of(self, command: Command, effects: Effects) -> Job | None:
        """Return a command's job as it is after this cycle; None if the daemon does not know it."""
        try:
            job = parse_token(command.token).job
        except ValueError:
            return None  # a component that is not of this daemon; it is stopped or forgotten all the same
        return effects.jobs.get(job) or self.queries.job(job)

    async def _write_with_retries(self, work: Callable[[], None]) -> None:
        """Write in the writer thread, and retry until it succeeds: nothing may be acted on that is not stored.

        When the database does not answer, reject waiting items; at the daemon's end, give up after a time.
        """

        def reject_items() -> None:
            self._cannot_write()
            if self._stopping and time.monotonic() - began >= LAST_WRITE_TIMEOUT_S:
                raise StoreUnavailable(self.database.problem)

        while True:
            began = time.monotonic()
            try:
                await self.database.run_transaction(WRITER, self._writer, work, reject_items)
                self.instruments.writes.note(time.monotonic() - began)
                self.database.note_success(WRITER)
                return
            except StoreUnavailable as error:
                self.instruments.writes.note(time.monotonic() - began, failed=True)
                self._cannot_write(error.message)
                if self._stopping:
                    raise  # as if killed: nothing of it was sent to agents
                await asyncio.sleep(RETRY_INTERVAL_S)

    def _cannot_write(self, reason: str = "") -> None:
        """Reject the waiting items that clients can retry."""
        self.database.note_failure(WRITER, reason)
        retained = []
        for item in self._items:
            if item.committed is None or item.decided:
                retained.append(item)
            elif not item.committed.done():
                item.committed.set_exception(self.database.make_error())
        self._items = deque(retained)

    def _finish_cycle(
        self, items: Sequence[WorkItem], effects: Effects, batch: Batch, messages: dict[str, list[dict[str, Any]]]
    ) -> None:
        """Act on a stored cycle: notify observers and callers, and send the commands to agents."""
        for job in batch.jobs.values():
            previous_state = self._stored.pop(job.id, None)
            if previous_state is not None:
                self.stored_counts[previous_state] -= 1
            if not job.state.is_final:
                self._stored[job.id] = job.state
                self.stored_counts[job.state] += 1
            for observer in self._observers:
                observer(job, previous_state)
        self.outbox.add_entries(batch.outbox)
        if self._notifications is not None and batch.notifications:
            self._notifications.send_notifications(batch.notifications)
        # ``start_session`` sends all commands to a cluster that has just reported its inventory.
        started = {item.inventory_of for item in items if item.inventory_of}
        if self._sessions is not None:
            for cluster, commands in messages.items():
                if cluster not in started:
                    self._sessions.send_commands(cluster, commands)
        for item in items:
            if item.start_session is not None:
                item.start_session([m for m in messages.get(item.inventory_of, ()) if m["type"] == "forget"])
            if item.after_write is not None:
                item.after_write()
            if item.committed is not None and not item.committed.done():
                item.committed.set_result(None)
        if self._sessions is not None:
            for cluster in sorted(effects.confirm):
                self._sessions.request_confirmation(cluster)
            self._sessions.set_awaited_clusters(self.queries.awaited_clusters())
        for ident in effects.jobs if self._watchers else ():
            self.wake_watchers(ident)
        reported = {
            event.cluster
            for item in items
            for event in item.events
            if isinstance(event, Reported) and isinstance(event.report, ClusterReport)
        }
        clusters = reported.union(effects.clusters)
        changed: dict[Topic, bool] = {"jobs": bool(effects.jobs), "clusters": bool(clusters)}
        if any(changed.values()):
            topics = [topic for topic, is_so in changed.items() if is_so]
            self.changes.note_change(*topics)


def log_change(job: Job, previous_state: JobState | None) -> None:
    """Log a job's start, end or return to the queue at level ``info``, and any other change at ``debug``."""
    if job.state is previous_state:
        return
    waits_again = job.state is JobState.QUEUED and previous_state is not None and previous_state.is_active
    is_important = (job.state.is_final or job.state is JobState.RUNNING or waits_again) and not job.spec.internal
    fields = {
        "job": job.id,
        "state": str(job.state),
        "before": None if previous_state is None else str(previous_state),
        "user": job.spec.owner,
        "attempt": job.generation,
        "clusters": sorted({component.cluster for component in job.attempt.gang}) if job.attempt else [],
        "reason": job.reason,
        "exit_code": job.exit_code,
    }
    if is_important:
        log.info("a job has changed", action="job-changed", **fields)
    else:
        log.debug("a job has changed", action="job-changed", **fields)


def steady_clock(machine: Clock = SYSTEM_CLOCK) -> Callable[[], float]:
    """Return a clock that starts at the machine's time and then counts on by the time since boot.

    Deadlines of jobs depend on it, so a step of the machine's clock must not affect it. It follows the
    machine's clock at the next start of the daemon.
    """
    began = machine.now() - machine.since_boot()
    return lambda: began + machine.since_boot()
