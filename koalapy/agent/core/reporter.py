"""Reports components, their output, node counts and disks to the daemon."""

import asyncio
import base64
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from koalapy.agent.components.component import Component
from koalapy.agent.core.lrm_monitor import LrmMonitor
from koalapy.agent.core.settings import AgentTimeouts
from koalapy.agent.lrm.port import LrmJob, LrmJobState, LrmSnapshot
from koalapy.agent.runners.runners import lrm_name
from koalapy.agent.runners.uplink import Uplink
from koalapy.agent.transfers.exports import missing_programs
from koalapy.model.bounds import NOTICES
from koalapy.model.disk import Disk, DiskLimits
from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.model.job import ComponentState, is_token
from koalapy.model.reports import (
    MAX_LISTED_NODES,
    MAX_LOST_RECORDS,
    ClusterReport,
    ComponentStatus,
    Inventory,
    NodeList,
    StageStatus,
    Versions,
)
from koalapy.protocol.messages import Output
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from koalapy.system.files import measure_disks

log = structlog.get_logger()

REPORTED_FOR = 3600.0
"""Seconds for which a lost record is reported."""
RECORD_LOST = "the agent has lost its record"
RESEND_INTERVAL = 10.0
"""Seconds without an acknowledgement after which output is sent again: the daemon's disk may have been full."""
DELIVERY_TIMEOUT = 300.0
"""Seconds for which a connected daemon may not answer to an ended component's output."""
EMPTY_REPORT, NO_VERSIONS = ClusterReport(total=0, idle=0), Versions()
MAX_INVENTORY_TEXT = 4 * 1024 * 1024
"""Characters of all texts of components in an inventory, which must fit into one frame."""
CHECK_TIMEOUT = 10.0
"""Seconds that a disk may take to report its free space."""


class LostRecords:
    """Tokens of components with missing or damaged records."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lost_at: dict[str, float] = {}

    def record_loss(self, token: str, reason: str) -> None:
        """Record and log the loss of a component's record, once for each component."""
        if token not in self._lost_at:
            self._lost_at[token] = self._clock.monotonic()
            log.error("a component's record is lost", action="record-lost", token=token, reason=reason)

    def recent_tokens(self) -> tuple[str, ...]:
        """Return the tokens of the records that were lost in the last hour, at most ``MAX_LOST_RECORDS``."""
        horizon = self._clock.monotonic() - REPORTED_FOR
        self._lost_at = {token: lost_at for token, lost_at in self._lost_at.items() if lost_at > horizon}
        return tuple(self._lost_at)[-MAX_LOST_RECORDS:]


class Reporter:
    """All components, and what the daemon knows of them on this connection."""

    def __init__(
        self,
        uplink: Uplink,
        monitor: LrmMonitor,
        live: dict[str, Component],
        clock: Clock = SYSTEM_CLOCK,
        versions: Versions = NO_VERSIONS,
    ) -> None:
        """Set up. ``live`` will hold the components that have not ended."""
        self.uplink, self._monitor, self._clock, self.versions = uplink, monitor, clock, versions
        monitor.report_problem = self._report_problem
        self.on_ended: list[Callable[[Component], object]] = []
        """Are called, perhaps several times, with an ended component."""
        self.components: dict[str, Component] = {}
        """Components by the names of their jobs in the resource manager."""
        self.live = live
        self.instance = ""
        self.notices: list[str] = []
        """Notices about the cluster for users."""
        self.disks: list[Disk] = []
        """The disks that the agent writes to."""
        self.lost_records = LostRecords(clock)
        self.low_disks: list[str] = []
        self.disk_shortage = ""
        """Full disks, as text: the reason that nothing may be started. Empty if there are none."""
        self.stray_users: dict[str, str] = {}
        """Accounts of jobs with our names but without a record, by job name."""
        self._is_welcomed = False
        self._has_sent_inventory = False
        self._reported: ClusterReport | None = None

    def add_component(self, component: Component) -> None:
        """Register a component, so that its status and output are reported."""
        self.components[component.name] = component
        if not component.ended:
            self.live[component.name] = component

    def find_component(self, token: str, instance: str | None = None) -> Component | None:
        """Return a component of a daemon; by default the one that was connected last."""
        return self.components.get(lrm_name(self.instance if instance is None else instance, token))

    def is_connected_to(self, instance: str) -> bool:
        """Return whether the agent is connected to the daemon of an instance."""
        return self.uplink.online.is_set() and self.instance == instance

    def on_welcome(self) -> None:
        """Start a connection. Report only a problem until the resource manager has answered."""
        self._is_welcomed, self._reported = True, None
        self._report_problem()

    def _report_problem(self) -> None:
        if self._monitor.problem:
            self.report_cluster(None)

    def send_inventory(self, snapshot: LrmSnapshot | None, stages: Callable[[], Iterable[StageStatus]]) -> None:
        """Send all components of the connected daemon, and its ``stages``.

        Without a snapshot, send the components of the journals, if there are any; the complete inventory follows.
        """
        components_of_daemon = [c for c in self.components.values() if c.instance == self.instance]
        if snapshot is None and not components_of_daemon:
            return
        for component in components_of_daemon if not self._has_sent_inventory else ():
            component.output.restart_sending()
        self._has_sent_inventory = True
        statuses = _shorten_texts([self._reported_status(c) for c in components_of_daemon])
        components = (*statuses, *(self._stray_statuses(snapshot) if snapshot is not None else ()))
        self.uplink.send_soon(Inventory(components, whole=snapshot is not None, stages=tuple(stages())))
        self._reported = None
        if snapshot is not None:
            self.report_cluster(snapshot)
        self._report_problem()
        for component, status in zip(components_of_daemon, statuses, strict=True):
            component.reported = status
            self.publish_output(component)

    def on_disconnect(self) -> None:
        self._is_welcomed = self._has_sent_inventory = False

    def publish_status(self, component: Component) -> None:
        """Send a component's status if it changed. On its end, also start its collection and send its last output."""
        if component.ended:
            self.live.pop(component.name, None)
            for on_ended in self.on_ended:
                on_ended(component)
            self.publish_output(component)
        if not self._has_sent_inventory or component.instance != self.instance:
            return
        status = self._reported_status(component)
        if status != component.reported:
            component.reported = status
            self.uplink.send_soon(status)

    def publish_stage(self, instance: str, status: StageStatus) -> bool:
        """Send a stage's status. Return whether its daemon is connected."""
        sent = self._has_sent_inventory and instance == self.instance
        if sent:
            self.uplink.send_soon(status)
        return sent

    def republish_status(self, component: Component) -> None:
        """Send a component's status even if it has not changed."""
        component.reported = None
        self.publish_status(component)

    def publish_output(self, component: Component) -> None:
        """Send the output of a component that the daemon can accept now. Do nothing without a connection."""
        if not self._has_sent_inventory or component.instance != self.instance:
            return
        while piece := component.output.next_piece():
            data = base64.b64encode(piece.data).decode("ascii")
            self.uplink.send_soon(Output(token=component.token, offset=piece.offset, data=data, gap=piece.gap))

    def on_output_acknowledged(self, component: Component, offset: int) -> None:
        """Send more output after the daemon stored it up to an offset. Report the end when all is stored."""
        component.output.acknowledge_to(offset)
        self.publish_output(component)
        if component.ended and not component.output.is_pending:
            self.publish_status(component)

    def resend_output(self) -> None:
        """Send again the output that the daemon did not acknowledge; give up after ``DELIVERY_TIMEOUT``."""
        if not self._has_sent_inventory:
            return
        now = self._clock.monotonic()
        for component in list(self.components.values()):
            output = component.output
            if component.instance != self.instance or not output.is_pending:
                continue
            if component.ended and now - output.progress_at > DELIVERY_TIMEOUT:
                output.give_up(f"the daemon took nothing for {DELIVERY_TIMEOUT:g} s")
                self.publish_status(component)
            elif output.sent > output.acknowledged and now - output.tried_at > RESEND_INTERVAL:
                output.rewind()
                self.publish_output(component)

    def report_cluster(self, snapshot: LrmSnapshot | None, *, even_unchanged: bool = False) -> None:
        """Send node counts if they changed, and why nothing can be started; without a snapshot the previous ones."""
        if not self._is_welcomed or (snapshot is not None and not self._has_sent_inventory):
            return
        problem = "; ".join(filter(None, (self._monitor.problem, self.disk_shortage)))
        calls = self._monitor.summarize_calls()
        if snapshot is not None:
            prefix = lrm_name(self.instance, "")
            running = (job for job in self._jobs_of_daemon(snapshot, prefix) if job.state is LrmJobState.RUNNING)
            report = ClusterReport(
                total=snapshot.total,
                idle=snapshot.idle,
                background=snapshot.background,
                down=snapshot.down,
                holding=frozenset(job.name.removeprefix(prefix) for job in running),
                problem=problem,
                notices=tuple(NOTICES.cut((*self.notices, *self.low_disks))),
                lacks=frozenset(missing_programs()),
                disks=tuple(self.disks),
                versions=self.versions,
                calls=calls,
                node_classes=snapshot.node_classes,
                shares=snapshot.shares,
                withheld=snapshot.withheld,
                job_sizes=snapshot.job_sizes,
                reservations=snapshot.reservations,
                lost_records=self.lost_records.recent_tokens(),
            )
        else:
            previous = self._reported or EMPTY_REPORT
            silent_for = self._monitor.silent_for
            report = replace(previous, problem=problem, versions=self.versions, calls=calls, silent_for=silent_for)
        if even_unchanged or report != self._reported:
            self._reported = report
            self.uplink.send_soon(report)

    def _reported_status(self, component: Component) -> ComponentStatus:
        """Return the status to report: ended only when the daemon has the results and all output."""
        status = component.current_status()
        if component.ended and (component.output.is_pending or component.awaits_collection):
            return replace(status, state=ComponentState.DELIVERING)
        return status

    def find_strays(self, snapshot: LrmSnapshot) -> Iterable[tuple[str, LrmJob]]:
        """Yield the jobs of the connected daemon that have not ended and have no record, with their tokens."""
        prefix = lrm_name(self.instance, "")
        for job in self._jobs_of_daemon(snapshot, prefix):
            token = job.name.removeprefix(prefix)
            is_over = job.gone or job.state is LrmJobState.ENDED
            # Another user's job may have such a name.
            if job.name not in self.components and not is_over and is_token(token):
                yield token, job

    async def list_nodes(self, _: Mapping[str, Any]) -> Mapping[str, object]:
        """Answer the daemon's question for single nodes: at most ``MAX_LISTED_NODES``, as a ``NodeList``."""
        snapshot, age = self._monitor.known_snapshot()
        if not snapshot.nodes:
            raise SiteRejected("its resource manager lists no single nodes", fault=SiteFault.UNKNOWN)
        prefix = lrm_name(self.instance, "")
        tokens = {
            node: job.name.removeprefix(prefix)
            for job in self._jobs_of_daemon(snapshot, prefix)
            if job.state is not LrmJobState.ENDED
            for node in job.nodes
        }
        nodes = sorted(snapshot.nodes, key=lambda node: node.state != "down")[:MAX_LISTED_NODES]
        listed = (replace(node, token=tokens.get(node.name, "")) if node.state == "held" else node for node in nodes)
        return asdict(NodeList(tuple(listed), age))

    def _stray_statuses(self, snapshot: LrmSnapshot) -> Iterable[ComponentStatus]:
        """Yield a status for each job without a record, which lets the daemon stop it. Remember the jobs' accounts."""
        self.stray_users.clear()
        for token, job in self.find_strays(snapshot):
            self.stray_users[job.name] = job.user
            yield ComponentStatus(token, ComponentState.WAITING, lrm_job=job.id, error=RECORD_LOST, infrastructure=True)

    def _jobs_of_daemon(self, snapshot: LrmSnapshot, prefix: str) -> Iterable[LrmJob]:
        """Yield the jobs with a component's name, except those of other accounts."""
        for job in snapshot.jobs:
            component = self.components.get(job.name)
            if job.name.startswith(prefix) and (component is None or component.user == job.user):
                yield job


def _shorten_texts(statuses: list[ComponentStatus]) -> list[ComponentStatus]:
    """Return statuses with texts that fit into one frame: programs and runners determine most of them."""
    if sum(len(s.error) + len(s.missing) + len(s.pending) for s in statuses) <= MAX_INVENTORY_TEXT:
        return statuses
    size = MAX_INVENTORY_TEXT // (3 * len(statuses))
    return [replace(s, error=s.error[:size], missing=s.missing[:size], pending=s.pending[:size]) for s in statuses]


@dataclass(eq=False, slots=True)
class DiskWatch:
    """Checks the agent's disks. Calls ``_changed`` when jobs may be started again, or no longer."""

    _reporter: Reporter
    _folders: Mapping[str, Path]
    _limits: DiskLimits
    _changed: Callable[[], None]
    _timeouts: AgentTimeouts

    async def watch_disks(self) -> None:
        """Check the disks regularly until cancelled."""
        while True:
            await self.check_disks()
            await asyncio.sleep(self._timeouts.disk_check_s)

    async def check_disks(self) -> None:
        """Measure the agent's disks and apply the result. Report a disk as full if it does not answer in time."""
        looking = asyncio.ensure_future(asyncio.to_thread(measure_disks, self._folders))
        await asyncio.wait({looking}, timeout=CHECK_TIMEOUT)
        places = " and ".join(map(str, self._folders.values()))
        if not looking.done():
            self._apply_disks([], [], f"the disk of {places} has not answered for {CHECK_TIMEOUT:g} s")
        try:
            disks = await looking
        except OSError as error:
            self._apply_disks([], [], f"the disk of {places} cannot be checked: {error.strerror or error}")
            return
        full = [str(disk) for disk in disks if self._limits.is_full(disk)]
        low = [str(disk) for disk in disks if self._limits.is_low(disk) and not self._limits.is_full(disk)]
        self._apply_disks(disks, low, "; ".join(full))

    def _apply_disks(self, disks: list[Disk], low: list[str], full: str) -> None:
        """Set the disks and shortages to report; log when a shortage begins or ends. ``full`` is empty without one."""
        reporter = self._reporter
        previous = reporter.disk_shortage, reporter.low_disks
        reporter.disks, reporter.low_disks, reporter.disk_shortage = disks, low, full
        if bool(full) != bool(previous[0]):
            if full:
                log.error("a disk is full", action="disk-full", reason=full)
            else:
                log.info("the disks have space again", action="disk-back")
        elif low and not previous[1]:
            log.warning("a disk is low", action="disk-low", reason="; ".join(low))
        if (full, low) != previous:
            self._changed()
