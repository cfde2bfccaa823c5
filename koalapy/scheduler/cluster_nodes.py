"""The nodes of one cluster: those of its last report, and those promised to components since."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from koalapy.model.cluster import NodeClass, count_idle
from koalapy.model.job import Token
from koalapy.model.job_sizes import NodeReservation
from koalapy.model.node_requirement import ANY_NODE, NodeFilter
from koalapy.model.reports import ClusterReport
from koalapy.scheduler.cluster_conditions import HealthStatus, UplinkUse
from koalapy.scheduler.node_classes import NodeClasses, has_more_nodes

NO_REPORT = ClusterReport(0, 0)


@dataclass(slots=True, eq=False)
class ClusterNodes:
    """The nodes of one cluster, counted by class; the resource manager chooses the individual nodes."""

    health: HealthStatus
    """It limits and doubts the nodes that count as available."""
    uplink: UplinkUse
    on_change: Callable[[], None] = lambda: None
    """Called after each change here that affects the available capacity. State changes made elsewhere are announced by
    ``Ledger.mark_cluster_changed``."""
    last_report: ClusterReport = NO_REPORT
    """The last report, with node counts that do not exceed the total. While the agent does not see the nodes, the
    earlier counts stay."""
    reported: bool = False
    """Whether the nodes have been reported in this daemon run."""
    exited: set[Token] = field(default_factory=set)
    """Components with a program that has ended, as reported before its exit code."""
    classes: NodeClasses = field(default_factory=NodeClasses)
    live: dict[Token, int] = field(default_factory=dict)
    """Size in nodes of each component that may hold nodes here."""
    kept_reservations: dict[str, NodeReservation] = field(default_factory=dict)
    """The daemon's reservations here, by their names in the resource manager."""
    drain_reservations: tuple[NodeReservation, ...] = ()
    """The planned drains, as reservations of all nodes."""
    _reserved: dict[Token, str] = field(default_factory=dict)
    """The live components with nodes of a reservation, and the name of that. They take no idle nodes."""
    delivering: set[Token] = field(default_factory=set)
    """Components that have released their nodes and still send output."""
    capacity_gained: bool = False
    """Whether nodes became available since this was last read."""
    capacity_expected: bool = False
    """Whether more nodes will become available than expected when this was last read."""
    preemptible: int = 0
    """Nodes of components that jobs of high priority may preempt."""
    _preemptible: dict[Token, int] = field(default_factory=dict)
    reclaimable: int = 0
    """Of these, nodes of guest jobs, which the home site may reclaim for its own users."""
    _guests: set[Token] = field(default_factory=set)
    """Components of jobs of other home sites."""
    about_to_end: dict[Token, float] = field(default_factory=dict)
    """Preemptible components that are expected to end by themselves, and when."""
    _awaiting: dict[Token, int] = field(default_factory=dict)
    """Components that do not have their nodes yet according to the last report, and their sizes."""
    _promised: int = 0
    """The sum of these sizes."""
    _beside: dict[Token, int] = field(default_factory=dict)
    """For each component that shares nodes: how many partly used nodes it could get when it was placed."""
    _leaving: dict[Token, int] = field(default_factory=dict)
    _leave_by: dict[Token, float] = field(default_factory=dict)
    """When the grace of each warned component ends."""
    _release_deadlines: dict[Token, float] = field(default_factory=dict)
    """For each component promised nodes of leaving ones: when the last of their graces ends."""
    _promised_from: dict[Token, frozenset[Token]] = field(default_factory=dict)
    """For each component promised more nodes than were idle: the components that were leaving then."""

    def report(self, report: ClusterReport, speed: float) -> None:
        """Store a report of the agent; ``speed`` is the power of node classes without a reported power."""
        self.on_change()
        previous = self.last_report
        self.capacity_gained |= bool(previous.lacks - report.lacks)
        if report.problem and not report.total:  # a restarted agent has not seen the nodes yet
            self.last_report = replace(
                report,
                total=previous.total,
                idle=previous.idle,
                background=previous.background,
                down=previous.down,
                withheld=previous.withheld,
                holding=previous.holding,
                shares=previous.shares,
                job_sizes=previous.job_sizes,
                reservations=previous.reservations,
            )
            return
        available_before, expected_before = self.available, self.expected
        classes_before, parts_before = self.node_classes, self.parts
        if previous.problem:
            available_before = available_before if report.problem else 0
            classes_before = parts_before = ()
        self.last_report = report = _capped(report)
        if report.node_classes or self.classes.reported:
            self.classes.report(report.node_classes, speed)
        self.reported = True
        if report.shares and not previous.shares:  # components of an earlier daemon run may share nodes
            for token in [token for token in self.live if self.classes.filter_of(token).shares]:
                self.clear_preemptible(token)
                self._leaving.pop(token, None)
        self.capacity_gained |= previous.job_sizes != report.job_sizes or previous.reservations != report.reservations
        doubt = self.health.doubt
        if doubt is not None and report.idle < doubt.nodes:
            # Some of the doubted idle nodes are in use now, so these existed.
            self.health.doubt = replace(doubt, nodes=report.idle) if report.idle else None
        self._await_nodes_again(previous.holding - report.holding)
        for token in [token for token in self._leaving if token not in self.live and not self.holds(token)]:
            del self._leaving[token]
        self.capacity_gained |= self.available > available_before
        if self.classes.reported:
            self.capacity_gained |= has_more_nodes(self.node_classes, classes_before)
            self.capacity_gained |= report.shares and has_more_nodes(self.parts, parts_before)
        self.capacity_expected |= self.expected > expected_before

    def _await_nodes_again(self, missing: frozenset[Token]) -> None:
        """Update the components that await nodes: add ``missing``, which lost them, and remove those that have them."""
        for token in missing:
            if token in self.live and token not in self._reserved:
                self._await_nodes(token, self.live[token])
        for token in [token for token in self._awaiting if self.holds(token)]:
            self._promised -= self._awaiting.pop(token)

    def _await_nodes(self, token: Token, size: int) -> None:
        self._awaiting[token] = size
        self._promised += size

    def promise(
        self,
        token: Token,
        size: int,
        nodes: NodeFilter = ANY_NODE,
        *,
        preemptible: bool = False,
        guest: bool = False,
        demand: float = 0.0,
        reservation: str = "",
    ) -> None:
        """Reserve nodes for a component. They are no longer available, even if the cluster reports them as idle.

        ``nodes``: which nodes it may get.
        ``preemptible``: jobs of high priority may preempt it and, if a ``guest``, jobs of this home site. ``demand``:
        bytes per second that it exchanges with other clusters. ``reservation``: the name of its reservation.
        """
        self.on_change()
        shares = self.last_report.shares and nodes.shares
        if reservation:
            self._reserved[token] = reservation
        elif shares:
            self._beside[token] = min(size, count_idle(self.parts, nodes))
        elif size > self.idle:
            self._promised_from[token] = frozenset(self._leaving)
            self._release_deadlines[token] = max(self._leave_by.values(), default=0.0)
        self.live[token] = size
        if guest:
            self._guests.add(token)
        if not reservation:
            self.classes.promise(token, nodes)
        self.uplink.add_demand(token, demand)
        if preemptible and not (shares or reservation):  # its end would free no whole node for others
            self._make_preemptible(token, size)
        if token not in self.last_report.holding and not reservation:
            self._await_nodes(token, size)
        if self.health.probation:
            self.health.trial_components.add(token)
        if self.health.doubt is not None and self.health.doubt.is_tried:
            self.health.proofs.add(token)

    def _make_preemptible(self, token: Token, size: int) -> None:
        """Count a component's nodes among those that preemption may free, and a guest's among the reclaimable ones."""
        self._preemptible[token] = size
        self.preemptible += size
        if token in self._guests:
            self.reclaimable += size

    def end_proof(self, token: Token) -> None:
        """Let the next component try doubted nodes, as this one has ended its try, successful or not."""
        if token in self.health.proofs:
            self.health.proofs.remove(token)
            self.on_change()
            self.capacity_gained |= not self.health.proofs

    def clear_trials(self) -> None:
        """Forget earlier trials, so that those still running do not delay the next one."""
        self.on_change()
        self.health.trial_components.clear()

    def clear_preemptible(self, token: Token) -> None:
        """Make a component not preemptible any more, as its job is ending."""
        if size := self._preemptible.pop(token, 0):
            self.preemptible -= size
            if token in self._guests:
                self.reclaimable -= size
            self.on_change()
        self.about_to_end.pop(token, None)

    def await_end(self, token: Token, until: float) -> None:
        """Expect a component to end by itself at ``until``. Its nodes are promised to others without preemption."""
        if token in self._preemptible:
            self._leaving[token] = self._preemptible[token]
            self.clear_preemptible(token)
            self.about_to_end[token] = until

    def expect_release(self, token: Token, deadline: float | None = None) -> None:
        """Expect a stopped component to release its nodes soon, or by ``deadline``, the end of its grace."""
        self.clear_preemptible(token)
        self._leave_by.pop(token, None)
        if deadline is not None and token in self.live:
            self._leave_by[token] = deadline
            for waiting in (waiting for waiting, leaving in self._promised_from.items() if token in leaving):
                self._release_deadlines[waiting] = max(self._release_deadlines[waiting], deadline)
        if token in self.live and not (token in self._reserved or self._may_share(token)):
            self.capacity_expected |= token not in self._leaving
            self._leaving[token] = self.live[token]
            self.on_change()

    @property
    def awaited_components(self) -> list[Token]:
        """Return the components for which reports are still expected."""
        return [*self.live, *self.delivering]

    def mark_delivering(self, token: Token) -> None:
        """Release the nodes of a component that still sends output."""
        self.release(token)
        self.delivering.add(token)

    def release(self, token: Token) -> None:
        """Remove an ended component.

        Nodes that the last report counts as held by it stay unavailable until the next report.
        """
        self.on_change()
        available_before, expected_before, parts_before = self.available, self.expected, self.parts
        self.delivering.discard(token)
        is_reserved = self._reserved.pop(token, "") != ""
        size, frees_nodes = self.live.pop(token, 0), not (is_reserved or self._may_share(token))
        self.capacity_gained |= is_reserved
        self.classes.release(token)
        self._beside.pop(token, None)
        self.capacity_gained |= self.uplink.remove_demand(token)
        self._promised_from.pop(token, None)
        self.exited.discard(token)
        self._leave_by.pop(token, None)
        self._release_deadlines.pop(token, None)
        self.clear_preemptible(token)
        self._guests.discard(token)
        self._promised -= self._awaiting.pop(token, 0)
        if token not in self.last_report.holding:
            self._leaving.pop(token, None)
        elif size and frees_nodes:
            self._leaving[token] = size
        if token in self.health.trial_components:
            self.health.trial_components.remove(token)
            self.capacity_gained |= not self.health.trial_components
        self.end_proof(token)
        self.capacity_gained |= self.available > available_before or has_more_nodes(self.parts, parts_before)
        self.capacity_expected |= self.expected > expected_before

    # Nodes

    @property
    def reservations(self) -> tuple[NodeReservation, ...]:
        """Return the present and coming reservations of its nodes, each once: the reported ones, and the daemon's."""
        reported, total = self.last_report.reservations, self.last_report.total
        if not self.kept_reservations and not self.drain_reservations:
            return reported
        names = {reservation.name for reservation in reported}
        unreported = [reservation for name, reservation in self.kept_reservations.items() if name not in names]
        added = (replace(r, idle=max(0, r.nodes - self.count_reserved(r.name, held=True))) for r in unreported)
        drains = (replace(drain, nodes=total, idle=total) for drain in self.drain_reservations)
        return tuple(sorted((*reported, *added, *drains), key=lambda entry: (entry.begins, entry.name)))

    def count_reserved(self, reservation: str, *, held: bool = False) -> int:
        """Return the nodes of a reservation that components have; ``held``: according to the last report."""
        return sum(
            self.live[token]
            for token, name in self._reserved.items()
            if name == reservation and (not held or self.holds(token))
        )

    def holds(self, token: Token) -> bool:
        """Return whether a component has its nodes according to the last report."""
        return token in self.last_report.holding

    @property
    def available(self) -> int:
        """Return the nodes that may be promised now: idle, less those promised or doubted, within the limit."""
        free = self.last_report.idle - self._promised  # read for every cluster in each scan, so it must be fast
        if self.health.doubt is not None:
            free -= self.doubted
        return max(0, self._within_limit(free))

    @property
    def node_classes(self) -> tuple[NodeClass, ...]:
        """Return the classes of the available nodes; empty if all nodes are equal."""
        return self.of_classes(self.available)

    @property
    def parts(self) -> tuple[NodeClass, ...]:
        """Return the partly used nodes that jobs may share now: none while the cluster is doubted or limited."""
        if (
            not self.last_report.shares
            or self.health.doubt is not None
            or self.health.limit is not None
            or self.health.unusable
        ):
            return ()
        return self.classes.parts(self._awaiting)

    def _may_share(self, token: Token) -> bool:
        """Return whether other jobs may use the nodes of a component too."""
        return self.last_report.shares and self.classes.filter_of(token).shares

    @property
    def capacity_without_own_jobs(self) -> int:
        """Return the nodes that would be available without any component of this scheduler."""
        report, reserved = self.last_report, sum(self.live[token] for token in self._reserved)
        unavailable = report.background + report.withheld + report.down + reserved
        return self._within_limit(report.total - unavailable - self.doubted)

    def _within_limit(self, count: int) -> int:
        """Return the node count, reduced to what the resource manager's limit allows."""
        return count if self.health.limit is None else min(count, self.health.limit.size - 1)

    @property
    def idle(self) -> int:
        """Return the idle nodes that are not promised, ignoring doubts and limits."""
        return max(0, self.last_report.idle - self._promised)

    @property
    def surplus(self) -> int:
        """Return the idle nodes less those promised or doubted; negative if there are too few."""
        return self.last_report.idle - self._promised_idle - self.doubted

    @property
    def _promised_idle(self) -> int:
        """Return the promised nodes without those that components may find among partly used ones."""
        if not self._beside:
            return self._promised
        return self._promised - sum(nodes for token, nodes in self._beside.items() if token in self._awaiting)

    @property
    def doubted(self) -> int:
        """Return the nodes reported idle that do not count now."""
        doubt = self.health.doubt
        return 0 if doubt is None or (doubt.is_tried and not self.health.proofs) else doubt.nodes

    def idle_reported_for(self, token: Token) -> int:
        """Return the nodes reported idle for a waiting component, less those promised to others of its class.

        Return 0 if an earlier component waits for another class, since it may hold up a strict queue. Return 0 for a
        component that shares nodes, since the resource manager may keep them for others.
        """
        if token in self._reserved or self._may_share(token):
            return 0
        nodes, waiting = self.classes.filter_of(token), 0
        for component in self.live:
            if component == token:
                break
            if component not in self.last_report.holding and self.classes.filter_of(component) not in (ANY_NODE, nodes):
                return 0
        for component, size in self._awaiting.items():
            if component not in self._leaving and (nodes.admits_all or self.classes.filter_of(component) == nodes):
                waiting += size
        return (
            self.last_report.idle if self.classes.admits_all(nodes) else self.classes.reported_idle(nodes)
        ) - waiting

    def largest_queued(self, token: Token, size: int) -> int:
        """Return the size of the largest component without nodes that was submitted no later than this one."""
        for component, its in self.live.items():
            if component == token:
                break
            if component not in self.last_report.holding:
                size = max(size, its)
        return size

    def forget_promised_nodes(self, token: Token) -> None:
        """Cancel the expected release of nodes promised to a component, as they were not released in time."""
        self.on_change()
        for leaving in self._promised_from.pop(token, ()):
            size = self._leaving.pop(leaving, 0)
            if leaving in self.about_to_end:
                del self.about_to_end[leaving]
                self._make_preemptible(leaving, size)

    def overdue_components(self, token: Token, now: float) -> list[Token]:
        """Return the components that should have ended by now and have nodes that were promised to this one."""
        return [leaving for leaving in self._promised_from.get(token, ()) if self.about_to_end.get(leaving, inf) <= now]

    @property
    def preemptible_components(self) -> Mapping[Token, int]:
        """Return the preemptible components and their nodes, without those about to end."""
        return self._preemptible

    @property
    def reclaimable_components(self) -> Mapping[Token, int]:
        """Return the preemptible components of guest jobs, which the home site may also reclaim."""
        return {token: size for token, size in self._preemptible.items() if token in self._guests}

    @property
    def leaving(self) -> int:
        """Return the nodes of components that are ending, or have ended since the last report."""
        return sum(self._leaving.values())

    def release_deadline(self, token: Token) -> float:
        """Return when the last grace ends of the components with nodes promised to this one; 0 without any."""
        return self._release_deadlines.get(token, 0.0)

    def unreleased_nodes(self, token: Token) -> int:
        """Return the nodes promised to a component that leaving components have not released yet."""
        return sum(self._leaving.get(leaving, 0) for leaving in self._promised_from.get(token, ()))

    @property
    def expected(self) -> int:
        """Return the nodes available once all leaving components have ended; negative if too many are promised."""
        return self.last_report.idle - self._promised_idle + self.leaving - self.doubted

    @property
    def used(self) -> int:
        """Return the nodes that components of this scheduler hold, are promised, or have not released yet."""
        if not self.reported:
            return sum(self.live.values())
        report = self.last_report
        return report.total - report.background - report.withheld - report.down - self.idle

    def of_classes(self, idle: int) -> tuple[NodeClass, ...]:
        """Return the classes of ``idle`` nodes."""
        if not self.classes.reported:
            return ()
        doubt = self.health.doubt
        doubted = (doubt.filter, self.doubted) if doubt is not None else None
        available = None if self.classes.kept.admits_all else self.available
        return self.classes.idle(idle, self._awaiting, doubted, available)


def _capped(report: ClusterReport) -> ClusterReport:
    """Return a report with node counts that add up to at most the total; agents may report more."""
    total, idle = report.total, min(report.idle, report.total)
    down = min(report.down, total - idle)
    background = min(report.background, total - idle - down)
    withheld = min(report.withheld, total - idle - down - background)
    if (idle, down, background, withheld) == (report.idle, report.down, report.background, report.withheld):
        return report
    return replace(report, idle=idle, down=down, background=background, withheld=withheld)
