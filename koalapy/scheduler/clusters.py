"""The state of one cluster: its reports, the nodes promised since, its contact and its health."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from math import inf

from koalapy.model.cluster import (
    ClusterState,
    ClusterView,
    Drain,
    NodeClass,
    add_unclassified,
    count_idle,
    resize_classes,
)
from koalapy.model.disk import Disk
from koalapy.model.job import JobId, Token
from koalapy.model.job_sizes import NodeReservation, SizeRanges
from koalapy.model.node_requirement import ANY_NODE, NodeFilter
from koalapy.model.profile import ClusterProfile
from koalapy.model.reports import ClusterReport, LrmCalls, Versions
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list
from koalapy.scheduler.cluster_conditions import (
    ClaimEvidence,
    ContactStatus,
    Doubt,
    HealthStatus,
    Limit,
    UnknownRefusals,
    UplinkUse,
)
from koalapy.scheduler.node_classes import NodeClasses, has_more_nodes

NO_REPORT_YET = "its agent is connected, and has not told yet what runs there"


@dataclass(slots=True, eq=False)
class ClusterStatus:
    """The state of one cluster. Nodes are counted by class; the resource manager chooses the individual nodes."""

    name: ClusterName
    speed: float = 1.0
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    _: KW_ONLY
    contact: ContactStatus = field(default_factory=ContactStatus)
    health: HealthStatus = field(default_factory=HealthStatus)
    drained: Drain | None = None
    on_change: Callable[[ClusterName], None] = lambda _: None
    """Called after each change here that affects the available capacity. State changes made elsewhere are announced by
    ``Ledger.mark_cluster_changed``."""

    uplink: UplinkUse = field(default_factory=UplinkUse)

    # Reports of its agent

    reported: bool = False
    """Whether its nodes have been reported in this daemon run."""
    total: int = 0
    background: int = 0
    down: int = 0
    withheld: int = 0
    """Nodes that are idle beyond the limits of one job."""
    problem: str = ""
    """The agent's reason why the resource manager can start nothing; empty if it can."""
    notices: tuple[str, ...] = ()
    """Other messages of its agent to operators."""
    lost_records: tuple[Token, ...] = ()
    """Components of which its agent has lost the records recently."""
    lacks: frozenset[str] = frozenset()
    """Required programs that are missing there."""
    disks: tuple[Disk, ...] = ()
    """The file systems to which its agent writes."""
    versions: Versions | None = None
    """The versions of the software there; None if the agent does not report them."""
    calls: tuple[LrmCalls, ...] = ()
    """Response statistics of its resource manager, as of ``reported_at``."""
    reported_at: float | None = None
    """When its agent last reported its nodes."""
    lrm_silent_since: float | None = None
    """When its resource manager last answered; None unless its agent reports that it does not answer."""
    outdated_since: float | None = None
    """Since when the node counts may be outdated, as the agent is away or cannot query its resource manager. None after
    the next full report."""
    exited: set[Token] = field(default_factory=set)
    """Components with a program that has ended, as reported before its exit code."""
    classes: NodeClasses = field(default_factory=NodeClasses)
    shares: bool = False
    """Whether jobs may share nodes there."""
    job_sizes: SizeRanges = ()
    """The sizes that its resource manager accepts; empty: any."""
    reservations: tuple[NodeReservation, ...] = ()
    """Present and coming reservations of its nodes."""
    _idle: int = 0
    _holding: frozenset[Token] = frozenset()

    # Nodes that components of this scheduler have, or were promised

    live: dict[Token, int] = field(default_factory=dict)
    """Size in nodes of each component that may hold nodes here."""
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
    _reserved_by_job: dict[JobId, int] = field(default_factory=dict)
    """Nodes reserved for jobs with a starvation guarantee, in the order of these jobs."""
    _trials: set[Token] = field(default_factory=set)
    """Components placed here as trials during probation."""

    # Reported nodes that are doubted, and limits on further components

    limit: Limit | None = None
    limits: int = 0
    """Limits reported in a row since it last accepted a component. Each doubles the next pause."""
    limit_lifted_at: float = -inf
    """When the pause after a limit last ended."""
    unknown_refusals: UnknownRefusals = field(default_factory=UnknownRefusals)
    doubt: Doubt | None = None
    evidence: ClaimEvidence = field(default_factory=ClaimEvidence)
    """Statistics of claims."""
    _proofs: set[Token] = field(default_factory=set)
    """Running claims for nodes that are tried again after a doubt."""

    def report(self, report: ClusterReport, now: float) -> None:
        """Store the agent's report of its nodes."""
        self.on_change(self.name)
        self.reported_at, self.versions, self.calls = now, report.versions, report.calls
        self.capacity_gained |= bool(self.lacks - report.lacks)
        self.lacks, self.disks = report.lacks, report.disks
        available_before, expected = (self.available if not self.problem or report.problem else 0), self.expected
        classes_before, parts_before = ((), ()) if self.problem else (self.node_classes, self.parts)
        self.problem, self.notices, self.lost_records = report.problem, report.notices, report.lost_records
        self.lrm_silent_since = now - report.silent_for if report.problem and report.silent_for else None
        if not report.problem:
            self.outdated_since = None
        elif self.outdated_since is None:
            self.outdated_since = now
        if report.problem and not report.total:
            return  # a restarted agent has not seen the nodes yet: keep the previous numbers
        # Agents may report more idle nodes than nodes.
        self.total, self._idle = report.total, min(report.idle, report.total)
        self.down = min(report.down, self.total - self._idle)
        self.background = min(report.background, self.total - self._idle - self.down)
        self.withheld = min(report.withheld, self.total - self._idle - self.down - self.background)
        if report.node_classes or self.classes.reported:
            self.classes.report(report.node_classes, self.speed)
        self.reported = True
        if report.shares and not self.shares:  # components of an earlier daemon run may share nodes
            for token in [token for token in self.live if self.classes.filter_of(token).shares]:
                self.clear_preemptible(token)
                self._leaving.pop(token, None)
        self.shares = report.shares
        self.capacity_gained |= self.job_sizes != report.job_sizes
        self.capacity_gained |= self.reservations != report.reservations
        self.job_sizes, self.reservations = report.job_sizes, report.reservations
        if self.doubt is not None and self._idle < self.doubt.nodes:
            # Some of the doubted idle nodes are in use now, so these existed.
            self.doubt = replace(self.doubt, nodes=self._idle) if self._idle else None
        self._take_holding(report.holding)
        for token in [token for token in self._leaving if token not in self.live and not self.holds(token)]:
            del self._leaving[token]
        self.capacity_gained |= self.available > available_before
        if self.classes.reported:
            self.capacity_gained |= has_more_nodes(self.node_classes, classes_before)
            self.capacity_gained |= self.shares and has_more_nodes(self.parts, parts_before)
        self.capacity_expected |= self.expected > expected

    def _take_holding(self, holding: frozenset[Token]) -> None:
        """Store which components the report counts as holding their nodes. Only those that changed are visited."""
        for token in self._holding - holding:
            if token in self.live:
                self._await_nodes(token, self.live[token])
        for token in [token for token in self._awaiting if token in holding]:
            self._promised -= self._awaiting.pop(token)
        self._holding = holding

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
    ) -> None:
        """Reserve nodes for a component. They are no longer available, even if the cluster reports them as idle.

        ``nodes``: which nodes it may get.
        ``preemptible``: jobs of high priority may preempt it and, if a ``guest``, jobs of this home site. ``demand``:
        bytes per second that it exchanges with other clusters.
        """
        self.on_change(self.name)
        shares = self.shares and nodes.shares
        if shares:
            self._beside[token] = min(size, count_idle(self.parts, nodes))
        elif size > self.idle:
            self._promised_from[token] = frozenset(self._leaving)
            self._release_deadlines[token] = max(self._leave_by.values(), default=0.0)
        self.live[token] = size
        if guest:
            self._guests.add(token)
        self.classes.promise(token, nodes)
        self.uplink.add_demand(token, demand)
        if preemptible and not shares:  # its end would free no whole node
            self._make_preemptible(token, size)
        if token not in self._holding:
            self._await_nodes(token, size)
        if self.health.probation:
            self._trials.add(token)
        if self.doubt is not None and self.doubt.is_tried:
            self._proofs.add(token)

    def _make_preemptible(self, token: Token, size: int) -> None:
        """Count a component's nodes among those that preemption may free, and a guest's among the reclaimable ones."""
        self._preemptible[token] = size
        self.preemptible += size
        if token in self._guests:
            self.reclaimable += size

    def end_proof(self, token: Token) -> None:
        """Let the next component try doubted nodes, as this one has ended its try, successful or not."""
        if token in self._proofs:
            self._proofs.remove(token)
            self.on_change(self.name)
            self.capacity_gained |= not self._proofs

    def clear_trials(self) -> None:
        """Forget earlier trials, so that those still running do not delay the next one."""
        self.on_change(self.name)
        self._trials.clear()

    def clear_preemptible(self, token: Token) -> None:
        """Make a component not preemptible any more, as its job is ending."""
        if size := self._preemptible.pop(token, 0):
            self.preemptible -= size
            if token in self._guests:
                self.reclaimable -= size
            self.on_change(self.name)
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
        if token in self.live and not self._may_share(token):
            self.capacity_expected |= token not in self._leaving
            self._leaving[token] = self.live[token]
            self.on_change(self.name)

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
        self.on_change(self.name)
        available_before, expected_before = self.available, self.expected
        self.delivering.discard(token)
        size, frees_nodes = self.live.pop(token, 0), not self._may_share(token)
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
        if token not in self._holding:
            self._leaving.pop(token, None)
        elif size and frees_nodes:
            self._leaving[token] = size
        if token in self._trials:
            self._trials.remove(token)
            self.capacity_gained |= not self._trials
        self.end_proof(token)
        self.capacity_gained |= self.available > available_before
        self.capacity_expected |= self.expected > expected_before

    def known_at(self, now: float) -> float | None:
        """Return the time as of which the node counts are valid; None if they were never reported."""
        if not self.reported:
            return None
        return now if self.outdated_since is None else min(now, self.outdated_since)

    # Nodes

    def holds(self, token: Token) -> bool:
        """Return whether a component has its nodes according to the last report."""
        return token in self._holding

    @property
    def available(self) -> int:
        """Return the nodes that may be promised now: idle, less those promised or doubted, within the limit."""
        free = self._idle - self._promised  # read for every cluster in each scan, so it must be fast
        if self.doubt is not None:
            free -= self.doubted
        return max(0, self._within_limit(free))

    @property
    def node_classes(self) -> tuple[NodeClass, ...]:
        """Return the classes of the available nodes; empty if all nodes are equal."""
        return self._of_classes(self.available)

    @property
    def parts(self) -> tuple[NodeClass, ...]:
        """Return the partly used nodes that jobs may share now: none while the cluster is doubted or limited."""
        if not self.shares or self.doubt is not None or self.limit is not None or self.health.unusable:
            return ()
        return self.classes.parts(self._awaiting)

    def _may_share(self, token: Token) -> bool:
        """Return whether other jobs may use the nodes of a component too."""
        return self.shares and self.classes.filter_of(token).shares

    def reserve(self, job: JobId, nodes: int) -> None:
        """Reserve nodes for a job, in place of its previous reservation here."""
        self.on_change(self.name)
        self._reserved_by_job[job] = nodes
        if not nodes:
            del self._reserved_by_job[job]

    def reserved_for_others(self, job: JobId | None = None) -> int:
        """Return the nodes reserved for other jobs. For a job with a reservation, only earlier ones count."""
        count = 0
        for holder, nodes in self._reserved_by_job.items():
            if holder == job:
                break
            count += nodes
        return count

    @property
    def capacity_without_own_jobs(self) -> int:
        """Return the nodes that would be available without any component of this scheduler."""
        return self._within_limit(self.total - self.background - self.withheld - self.down - self.doubted)

    def _within_limit(self, count: int) -> int:
        """Return the node count, reduced to what the resource manager's limit allows."""
        return count if self.limit is None else min(count, self.limit.size - 1)

    @property
    def idle(self) -> int:
        """Return the idle nodes that are not promised, ignoring doubts and limits."""
        return max(0, self._idle - self._promised)

    @property
    def surplus(self) -> int:
        """Return the idle nodes less those promised or doubted; negative if there are too few."""
        return self._idle - self._promised_idle - self.doubted

    @property
    def _promised_idle(self) -> int:
        """Return the promised nodes without those that components may find among partly used ones."""
        if not self._beside:
            return self._promised
        return self._promised - sum(nodes for token, nodes in self._beside.items() if token in self._awaiting)

    @property
    def doubted(self) -> int:
        """Return the nodes reported idle that do not count now."""
        if self.doubt is None or (self.doubt.is_tried and not self._proofs):
            return 0
        return self.doubt.nodes

    def idle_reported_for(self, token: Token) -> int:
        """Return the nodes reported idle for a waiting component, less those promised to others of its class.

        Return 0 if an earlier component waits for another class, since a strict queue may be held up by it, and for a
        component that shares nodes, which the resource manager may keep for others.
        """
        if self._may_share(token):
            return 0
        nodes, waiting = self.classes.filter_of(token), 0
        for component in self.live:
            if component == token:
                break
            if component not in self._holding and self.classes.filter_of(component) not in (ANY_NODE, nodes):
                return 0
        for component, size in self._awaiting.items():
            if component not in self._leaving and (nodes.admits_all or self.classes.filter_of(component) == nodes):
                waiting += size
        return (self._idle if self.classes.admits_all(nodes) else self.classes.reported_idle(nodes)) - waiting

    def largest_queued(self, token: Token, size: int) -> int:
        """Return the size of the largest component without nodes that was submitted no later than this one."""
        for component, its in self.live.items():
            if component == token:
                break
            if component not in self._holding:
                size = max(size, its)
        return size

    def forget_promised_nodes(self, token: Token) -> None:
        """Cancel the expected release of nodes promised to a component, as they were not released in time."""
        self.on_change(self.name)
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
        return self._idle - self._promised_idle + self.leaving - self.doubted

    @property
    def reported_idle(self) -> int:
        return self._idle

    @property
    def used(self) -> int:
        """Return the nodes that components of this scheduler hold, are promised, or have not released yet."""
        if not self.reported:
            return sum(self.live.values())
        return self.total - self.background - self.withheld - self.down - self.idle

    # Whether it may be used

    @property
    def has_agent(self) -> bool:
        """Return whether its agent is connected, even if its resource manager has not answered yet."""
        return self.contact.has_agent or self.contact.connected or bool(self.problem)

    @property
    def absence(self) -> str:
        """Return why its agent is not connected; empty if it is."""
        return "" if self.has_agent else self.contact.agent_failed or self.contact.disconnected_because

    @property
    def is_in_reach(self) -> bool:
        """Return whether its agent is connected and can use its resource manager."""
        return self.contact.connected and not self.problem

    @property
    def is_open(self) -> bool:
        """Return whether components may be placed here now; on probation only one trial at a time."""
        state = self.state
        return state is ClusterState.USABLE or (state is ClusterState.PROBATION and not self._trials)

    @property
    def state(self) -> ClusterState:
        """Return the condition that decides whether components may be placed here; an operator's drain comes first."""
        if self.drained is not None:
            return ClusterState.DRAINED
        if not self.contact.connected:
            return ClusterState.UNREACHABLE
        if self.health.unusable and not self.health.probation:
            return ClusterState.UNUSABLE
        if self.problem:
            return ClusterState.UNREACHABLE
        return ClusterState.PROBATION if self.health.unusable else ClusterState.USABLE

    @property
    def state_reason(self) -> str:
        """Return why nothing is placed here, as all users may know it; empty if the cluster is usable."""
        if self.drained is not None:
            author = f"by {self.drained.by}" if self.drained.by else "by an operator"
            return f"{author}: {self.drained.reason}" if self.drained.reason else author
        if not self.contact.connected:
            return self.problem or self.absence or NO_REPORT_YET
        if self.health.unusable and not self.health.probation:
            return self.health.summary
        if self.problem:
            return self.problem
        return f"on probation, one component at a time; {self.health.summary}" if self.health.unusable else ""

    @property
    def moves_files(self) -> bool:
        return "rsync" not in self.lacks

    @property
    def capacity_restriction(self) -> str:
        """Return the limit or doubt that reduces the available nodes; empty without any."""
        return "; ".join(str(condition) for condition in (self.limit, self.doubt) if condition is not None)

    @property
    def status_text(self) -> str:
        """Return everything that an operator should know about the cluster in one line; empty if all is well."""
        lacks = f"has no {format_list(sorted(self.lacks))}: no files come there from other clusters, and none go"
        return "; ".join(
            filter(
                None,
                (
                    self.state_reason,
                    self.capacity_restriction,
                    lacks if self.lacks else "",
                    *self.reservation_texts,
                    *self.notices,
                ),
            )
        )

    @property
    def reservation_texts(self) -> list[str]:
        """Return the present and coming reservations of its nodes, as of the last report."""
        now = self.reported_at or 0.0
        return [text for reservation in self.reservations if (text := reservation.describe(now))]

    def view(self, idle: int, *, by_preemption: bool = False, hides_parts: bool = False) -> ClusterView:
        """Return the cluster as policies see it, with ``idle`` idle nodes. Probation is shown as usable or unusable.

        ``by_preemption``: the nodes that are not available yet may be of any class. ``hides_parts``: partly used nodes
        are not offered.
        """
        state = self.state
        if state is ClusterState.PROBATION:
            state = ClusterState.UNUSABLE if self._trials else ClusterState.USABLE
        note = "" if state is ClusterState.USABLE else self.state_reason
        classes = self._of_classes(min(idle, self.available) if by_preemption else idle)
        if by_preemption and classes and idle > self.available:
            freed = idle - self.available
            classes = resize_classes(classes, idle) if len(classes) == 1 else add_unclassified(classes, freed)
        parts = () if hides_parts or not self.shares else self.parts
        limits = None, self.job_sizes, self.reservations
        return ClusterView(self.name, self.total, idle, state, self.speed, note, classes, parts, *limits)

    def _of_classes(self, idle: int) -> tuple[NodeClass, ...]:
        if not self.classes.reported:
            return ()
        doubted = (self.doubt.filter, self.doubted) if self.doubt is not None else None
        available = None if self.classes.kept.admits_all else self.available
        return self.classes.idle(idle, self._awaiting, doubted, available)
