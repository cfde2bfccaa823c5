"""What is known of one cluster: what it reported, what was promised since, its contact and its health."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from math import inf

from koalapy.model.cluster import ClusterState, ClusterView, Drain, NodeClass, resize_classes
from koalapy.model.disk import Disk
from koalapy.model.job import JobId, Token
from koalapy.model.profile import ClusterProfile
from koalapy.model.reports import ClusterReport, LrmCalls, NodeClassReport, Versions
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


@dataclass(slots=True, eq=False)
class NodeClasses:
    """The kinds of nodes of a cluster, as its agent reported them; empty where all are alike."""

    _classes: tuple[NodeClass, ...] = ()
    _asked_for: dict[Token, str] = field(default_factory=dict)
    """The class that a component asks for, of those that ask for one."""

    def report(self, classes: tuple[NodeClassReport, ...], speed: float) -> None:
        """Take in what its agent says; ``speed`` is the power of those of which it says none."""
        known = {each.name: each for each in classes}.values()  # no two of one name, whatever an agent says
        self._classes = tuple(
            NodeClass(each.name, min(each.idle, each.total), each.power or speed, each.memory, each.total)
            for each in known
        )

    def promise(self, token: Token, name: str) -> None:
        """A component has asked for nodes of a class."""
        if name:
            self._asked_for[token] = name

    def release(self, token: Token) -> None:
        """A component has ended."""
        self._asked_for.pop(token, None)

    def requested_class(self, token: Token) -> str:
        """The class that a component asks for; empty: none."""
        return self._asked_for.get(token, "")

    def reported_idle(self, name: str) -> int:
        return sum(each.idle for each in self._classes if each.name == name)

    def idle(
        self, idle: int, awaiting: Mapping[Token, int], doubted: tuple[str, int] | None = None
    ) -> tuple[NodeClass, ...]:
        """Return the classes of so many idle nodes, less those promised or ``doubted``. A component without a class is
        thought to get what resource managers give first."""
        if not self._classes:
            return ()
        promised = dict[str, int]((doubted,) if doubted else ())
        for token, name in self._asked_for.items():
            promised[name] = promised.get(name, 0) + awaiting.get(token, 0)
        left = tuple(
            replace(each, idle=max(0, each.idle - gone)) if (gone := promised.get(each.name, 0)) else each
            for each in self._classes
        )
        return resize_classes(left, idle)


def has_more_nodes(now: tuple[NodeClass, ...], before: tuple[NodeClass, ...]) -> bool:
    """Whether there are more nodes of some class, or of a better one."""
    known = {(each.name, each.power, each.memory): each.idle for each in before}
    return any(each.idle > known.get((each.name, each.power, each.memory), 0) for each in now)


NO_REPORT_YET = "its agent is connected, and has not told yet what runs there"


@dataclass(slots=True, eq=False)
class ClusterStatus:
    """One cluster. Nodes are counted, by class too; which ones a component gets is the cluster's own business."""

    name: ClusterName
    speed: float = 1.0
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    _: KW_ONLY
    contact: ContactStatus = field(default_factory=ContactStatus)
    health: HealthStatus = field(default_factory=HealthStatus)
    drained: Drain | None = None
    on_change: Callable[[ClusterName], None] = lambda _: None
    """Is told of each change here that bears on what the cluster can be given; those of its state, which others make,
    are told by ``Ledger.mark_cluster_changed``."""

    uplink: UplinkUse = field(default_factory=UplinkUse)

    # As its agent reported

    reported: bool = False
    """Whether it has told its nodes since the daemon began."""
    total: int = 0
    background: int = 0
    down: int = 0
    problem: str = ""
    """Why nothing can be started there, by what its agent knows of its resource manager; empty when it can."""
    notices: tuple[str, ...] = ()
    """What its agent tells people beside that."""
    lost_records: tuple[Token, ...] = ()
    """Components whose records its agent has lost of late."""
    lacks: frozenset[str] = frozenset()
    """Programs that are missing there."""
    disks: tuple[Disk, ...] = ()
    """Where its agent writes."""
    versions: Versions | None = None
    """What runs there; an agent of before there was this says nothing."""
    calls: tuple[LrmCalls, ...] = ()
    """How its resource manager has answered its agent, as of ``reported_at``."""
    reported_at: float | None = None
    """When its agent last told its nodes: all that is known of these is as old as that."""
    outdated_since: float | None = None
    """Since when what it told of its nodes may not be so any more: its agent is away, or could not ask or use its
    resource manager. It is so until it has told them anew."""
    over: set[Token] = field(default_factory=set)
    """Components whose program has ended, as was told before its exit code."""
    classes: NodeClasses = field(default_factory=NodeClasses)
    _idle: int = 0
    _holding: frozenset[Token] = frozenset()

    # What components of ours have, or were promised

    live: dict[Token, int] = field(default_factory=dict)
    """Size in nodes of each component that may hold nodes here."""
    delivering: set[Token] = field(default_factory=set)
    """Components that have given back their nodes here and still send what they have."""
    capacity_gained: bool = False
    """Whether nodes became available here since the grid was last asked."""
    capacity_expected: bool = False
    """Whether more nodes will be available than was expected when the grid was last asked."""
    preemptible: int = 0
    """Nodes of components that make room for jobs of high priority."""
    _preemptible: dict[Token, int] = field(default_factory=dict)
    reclaimable: int = 0
    """Of these, nodes of jobs of other home sites, where it may take them back for its own users."""
    _guests: set[Token] = field(default_factory=set)
    """Components of jobs of other home sites."""
    about_to_end: dict[Token, float] = field(default_factory=dict)
    """Those that would, and are expected to end by themselves before; and when."""
    _awaiting: dict[Token, int] = field(default_factory=dict)
    """Those of which the last report does not say that they have their nodes."""
    _promised: int = 0
    """The nodes of these."""
    _leaving: dict[Token, int] = field(default_factory=dict)
    _leave_by: dict[Token, float] = field(default_factory=dict)
    """Of those that are leaving after a grace: when that is over."""
    _release_deadlines: dict[Token, float] = field(default_factory=dict)
    """When it is over of all whose nodes others were promised."""
    _promised_from: dict[Token, frozenset[Token]] = field(default_factory=dict)
    """The components that were leaving when others were promised nodes that were not idle: theirs."""
    _kept: dict[JobId, int] = field(default_factory=dict)
    """Nodes that nobody else is given than these jobs, which were promised their turn, in the order of their turns."""
    _trials: set[Token] = field(default_factory=set)
    """Components that are tried here while it is on probation."""

    # What it is not believed, or does not take

    limit: Limit | None = None
    limits: int = 0
    """How often it has told of a limit since it last took a component: each makes the next pause longer."""
    limit_lifted_at: float = -inf
    """When the pause after a limit was last over."""
    unknown_refusals: UnknownRefusals = field(default_factory=UnknownRefusals)
    doubt: Doubt | None = None
    evidence: ClaimEvidence = field(default_factory=ClaimEvidence)
    """What claims have shown of it."""
    _proofs: set[Token] = field(default_factory=set)
    """Claims that are under way for nodes that count again after a doubt."""

    def report(self, report: ClusterReport, now: float) -> None:
        """Take in what its agent says of its nodes."""
        self.on_change(self.name)
        self.reported_at, self.versions, self.calls = now, report.versions, report.calls
        self.capacity_gained |= bool(self.lacks - report.lacks)
        self.lacks, self.disks = report.lacks, report.disks
        before, expected = (self.available if not self.problem or report.problem else 0), self.expected
        known = () if self.problem else self.node_classes
        self.problem, self.notices, self.lost_records = report.problem, report.notices, report.lost_records
        if not report.problem:
            self.outdated_since = None
        elif self.outdated_since is None:
            self.outdated_since = now
        if report.problem and not report.total:
            return  # its agent is new and has not seen its nodes yet: what was known of them stands
        # No node is two things, whatever an agent says.
        self.total, self._idle = report.total, min(report.idle, report.total)
        self.down = min(report.down, self.total - self._idle)
        self.background = min(report.background, self.total - self._idle - self.down)
        self.classes.report(report.node_classes, self.speed)
        self.reported = True
        if self.doubt is not None and self._idle < self.doubt.nodes:
            # Somebody has taken some of them: these were there.
            self.doubt = replace(self.doubt, nodes=self._idle) if self._idle else None
        self._take_holding(report.holding)
        for token in [token for token in self._leaving if token not in self.live and not self.holds(token)]:
            del self._leaving[token]
        self.capacity_gained |= self.available > before or has_more_nodes(self.node_classes, known)
        self.capacity_expected |= self.expected > expected

    def _take_holding(self, holding: frozenset[Token]) -> None:
        """The components that it counts now; only those are looked at that it did not count before, or does no more."""
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
        node_class: str = "",
        *,
        preemptible: bool = False,
        guest: bool = False,
        demand: float = 0.0,
    ) -> None:
        """Give nodes to a component: they are not available from now on, whatever the cluster reports.

        ``preemptible``: it makes room for jobs of high priority and, as a ``guest``, for those whose home site this is.
        ``demand``: bytes per second that it exchanges with other clusters.
        """
        self.on_change(self.name)
        if size > self.idle:
            self._promised_from[token] = frozenset(self._leaving)
            self._release_deadlines[token] = max(self._leave_by.values(), default=0.0)
        self.live[token] = size
        if guest:
            self._guests.add(token)
        self.classes.promise(token, node_class)
        self.uplink.add_demand(token, demand)
        if preemptible:
            self._make_preemptible(token, size)
        if token not in self._holding:
            self._await_nodes(token, size)
        if self.health.probation:
            self._trials.add(token)
        if self.doubt is not None and self.doubt.is_tried:
            self._proofs.add(token)

    def _make_preemptible(self, token: Token, size: int) -> None:
        self._preemptible[token] = size
        self.preemptible += size
        if token in self._guests:
            self.reclaimable += size

    def end_proof(self, token: Token) -> None:
        """A claim has shown what it could, or never will: the next may."""
        if token in self._proofs:
            self._proofs.remove(token)
            self.on_change(self.name)
            self.capacity_gained |= not self._proofs

    def clear_trials(self) -> None:
        """What was tried here before is no trial of what comes next, however long it goes on."""
        self.on_change(self.name)
        self._trials.clear()

    def clear_preemptible(self, token: Token) -> None:
        """The component makes room for nobody any more: its job has come to its end."""
        if size := self._preemptible.pop(token, 0):
            self.preemptible -= size
            if token in self._guests:
                self.reclaimable -= size
            self.on_change(self.name)
        self.about_to_end.pop(token, None)

    def await_end(self, token: Token, until: float) -> None:
        """The component ends by itself until then: others are promised its nodes, and it need not make room."""
        if token in self._preemptible:
            self._leaving[token] = self._preemptible[token]
            self.clear_preemptible(token)
            self.about_to_end[token] = until

    def expect_release(self, token: Token, by: float | None = None) -> None:
        """The component was told to end: its nodes will be free soon, or after its grace, which is over ``by`` then."""
        self.clear_preemptible(token)
        self._leave_by.pop(token, None)
        if by is not None and token in self.live:
            self._leave_by[token] = by
            for other in (other for other, of in self._promised_from.items() if token in of):
                self._release_deadlines[other] = max(self._release_deadlines[other], by)
        if token in self.live:
            self.capacity_expected |= token not in self._leaving
            self._leaving[token] = self.live[token]
            self.on_change(self.name)

    @property
    def awaited_components(self) -> list[Token]:
        """Components of which something is to be heard."""
        return [*self.live, *self.delivering]

    def mark_delivering(self, token: Token) -> None:
        """The component has given back its nodes, and has not ended."""
        self.release(token)
        self.delivering.add(token)

    def release(self, token: Token) -> None:
        """The component has ended; nodes that the last report counted as its own stay unavailable until the next."""
        self.on_change(self.name)
        before, expected = self.available, self.expected
        self.delivering.discard(token)
        size = self.live.pop(token, 0)
        self.classes.release(token)
        self.capacity_gained |= self.uplink.remove_demand(token)
        self._promised_from.pop(token, None)
        self.over.discard(token)
        self._leave_by.pop(token, None)
        self._release_deadlines.pop(token, None)
        self.clear_preemptible(token)
        self._guests.discard(token)
        self._promised -= self._awaiting.pop(token, 0)
        if token not in self._holding:
            self._leaving.pop(token, None)
        elif size:
            self._leaving[token] = size
        if token in self._trials:
            self._trials.remove(token)
            self.capacity_gained |= not self._trials
        self.end_proof(token)
        self.capacity_gained |= self.available > before
        self.capacity_expected |= self.expected > expected

    def known_at(self, now: float) -> float | None:
        """Return the time as of which its nodes are known, as a rule now; None if they were never told."""
        if not self.reported:
            return None
        return now if self.outdated_since is None else min(now, self.outdated_since)

    # Nodes

    def holds(self, token: Token) -> bool:
        """Whether its last report says that a component has its nodes."""
        return token in self._holding

    @property
    def available(self) -> int:
        """The nodes that may be promised now: idle, less those promised or in doubt, within the limit."""
        free = self._idle - self._promised  # asked of every cluster in each scan
        if self.doubt is not None:
            free -= self.doubted
        return max(0, self._within_limit(free))

    @property
    def node_classes(self) -> tuple[NodeClass, ...]:
        """The available nodes by what they are; none where they are not known to differ."""
        return self._of_classes(self.available)

    def available_of(self, node_class: str) -> int:
        """The available nodes of a class; of any, where it has no name."""
        if not node_class:
            return self.available
        return sum(each.idle for each in self.node_classes if each.name == node_class)

    def reserve(self, job: JobId, nodes: int) -> None:
        """Give so many nodes to nobody else than a job, in place of those that were kept for it before."""
        self.on_change(self.name)
        self._kept[job] = nodes
        if not nodes:
            del self._kept[job]

    def reserved_for_others(self, job: JobId | None = None) -> int:
        """Return the nodes kept from a job for others; from one that keeps some itself, only by jobs before it."""
        count = 0
        for other, kept in self._kept.items():
            if other == job:
                break
            count += kept
        return count

    @property
    def capacity_without_own_jobs(self) -> int:
        """Nodes that could be promised if no component of ours had any."""
        return self._within_limit(self.total - self.background - self.down - self.doubted)

    def _within_limit(self, count: int) -> int:
        """As many of these nodes as the resource manager takes of us."""
        return count if self.limit is None else min(count, self.limit.size - 1)

    @property
    def idle(self) -> int:
        """The same as available, whatever we doubt and whatever limits the resource manager has for us."""
        return max(0, self._idle - self._promised)

    @property
    def surplus(self) -> int:
        """Nodes beyond those that are promised or in doubt; below 0 when there are too few for these."""
        return self._idle - self._promised - self.doubted

    @property
    def doubted(self) -> int:
        """Nodes that are said to be idle and do not count now."""
        if self.doubt is None or (self.doubt.is_tried and not self._proofs):
            return 0
        return self.doubt.nodes

    def idle_reported_for(self, token: Token) -> int:
        """Return the nodes reported idle beyond those promised to waiting components, of the class of this one. None
        where one before it waits for another class: a strict queue was held up by that one."""
        requested_class, asked, waiting = self.classes.requested_class, self.classes.requested_class(token), 0
        for other in self.live:
            if other == token:
                break
            if other not in self._holding and requested_class(other) not in ("", asked):
                return 0
        for other, size in self._awaiting.items():
            if other not in self._leaving and (not asked or requested_class(other) == asked):
                waiting += size
        return (self.classes.reported_idle(asked) if asked else self._idle) - waiting

    def largest_queued(self, token: Token, size: int) -> int:
        """Return the size of the largest component that was promised nodes before this one and has none, or its own."""
        for other, its in self.live.items():
            if other == token:
                break
            if other not in self._holding:
                size = max(size, its)
        return size

    def forget_promised_nodes(self, token: Token) -> None:
        """The nodes that a component was promised of others never came: nobody is promised them any more."""
        self.on_change(self.name)
        for other in self._promised_from.pop(token, ()):
            size = self._leaving.pop(other, 0)
            if other in self.about_to_end:
                del self.about_to_end[other]
                self._make_preemptible(other, size)

    def overdue_components(self, token: Token, now: float) -> list[Token]:
        """Those that should have ended by now whose nodes a component was promised."""
        return [other for other in self._promised_from.get(token, ()) if self.about_to_end.get(other, inf) <= now]

    @property
    def preemptible_components(self) -> Mapping[Token, int]:
        """Those that make room for jobs of high priority, with their nodes, but for those that are about to end."""
        return self._preemptible

    @property
    def reclaimable_components(self) -> Mapping[Token, int]:
        """Of these the ones that also make room for those whose home site it is."""
        return {token: size for token, size in self._preemptible.items() if token in self._guests}

    @property
    def leaving(self) -> int:
        """Nodes of components that are ending, or have ended since the last report."""
        return sum(self._leaving.values())

    def release_deadline(self, token: Token) -> float:
        """When the grace is over of all whose nodes a component was promised, as of then; 0 without any."""
        return self._release_deadlines.get(token, 0.0)

    def unreleased_nodes(self, token: Token) -> int:
        """Nodes that a component was promised of others that were leaving, and that these have not given back yet."""
        return sum(self._leaving.get(other, 0) for other in self._promised_from.get(token, ()))

    @property
    def expected(self) -> int:
        """Nodes available once all that is ending has ended; below 0 when more is promised than that."""
        return self._idle - self._promised + self.leaving - self.doubted

    @property
    def reported_idle(self) -> int:
        return self._idle

    @property
    def used(self) -> int:
        """The nodes that components of ours have, were promised, or that the resource manager has not let go of."""
        if not self.reported:
            return sum(self.live.values())
        return self.total - self.background - self.down - self.idle

    # Whether it may be used

    @property
    def has_agent(self) -> bool:
        """Return whether its agent is connected, whether or not its resource manager has answered it yet."""
        return self.contact.has_agent or self.contact.connected or bool(self.problem)

    @property
    def absence(self) -> str:
        """Return why its agent is not connected; empty when it is."""
        return "" if self.has_agent else self.contact.agent_failed or self.contact.disconnected_because

    @property
    def is_in_reach(self) -> bool:
        """Whether it is heard of, and can use its resource manager."""
        return self.contact.connected and not self.problem

    @property
    def is_open(self) -> bool:
        """Whether components may be placed here now; on probation only while none is being tried."""
        state = self.state
        return state is ClusterState.USABLE or (state is ClusterState.PROBATION and not self._trials)

    @property
    def state(self) -> ClusterState:
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
        """Why nothing is placed here, in the words an operator would use; empty when usable."""
        if self.drained is not None:
            by = f"by {self.drained.by}" if self.drained.by else "by an operator"
            return f"{by}: {self.drained.reason}" if self.drained.reason else by
        if not self.contact.connected:
            return self.problem or self.absence or NO_REPORT_YET
        if self.health.unusable and not self.health.probation:
            return self.health.note
        if self.problem:
            return self.problem
        return f"on probation, one component at a time; {self.health.note}" if self.health.unusable else ""

    @property
    def moves_files(self) -> bool:
        return "rsync" not in self.lacks

    @property
    def capacity_restriction(self) -> str:
        """Why it is given less than it has idle nodes: a limit, or a doubt; empty when neither."""
        return "; ".join(str(each) for each in (self.limit, self.doubt) if each is not None)

    @property
    def status_text(self) -> str:
        """Everything that an operator should know of it in one line; empty when all is well."""
        lacks = f"has no {format_list(sorted(self.lacks))}: no files come there from other clusters, and none go"
        return "; ".join(
            filter(None, (self.state_reason, self.capacity_restriction, lacks if self.lacks else "", *self.notices))
        )

    def view(self, idle: int) -> ClusterView:
        """What policies see, with so many idle nodes: a cluster on probation is usable or not, as it may be tried."""
        state = self.state
        if state is ClusterState.PROBATION:
            state = ClusterState.UNUSABLE if self._trials else ClusterState.USABLE
        note = "" if state is ClusterState.USABLE else self.state_reason
        return ClusterView(self.name, self.total, idle, state, self.speed, note, self._of_classes(idle))

    def _of_classes(self, idle: int) -> tuple[NodeClass, ...]:
        doubted = (self.doubt.node_class, self.doubted) if self.doubt is not None else None
        return self.classes.idle(idle, self._awaiting, doubted)
