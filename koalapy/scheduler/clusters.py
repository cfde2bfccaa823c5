"""The state of one cluster: its nodes, its contact and its health."""

from dataclasses import KW_ONLY, dataclass, field
from math import inf

from koalapy.model.cluster import ClusterState, ClusterView, Drain, add_unclassified, resize_classes
from koalapy.model.profile import ClusterProfile
from koalapy.model.reports import ClusterReport
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list, format_utc
from koalapy.scheduler.cluster_conditions import ContactStatus, HealthStatus, UplinkUse
from koalapy.scheduler.cluster_nodes import ClusterNodes

NO_REPORT_YET = "its agent is connected, and has not told yet what runs there"


@dataclass(frozen=True, slots=True)
class NodeUse:
    """The nodes of a cluster by use, as all pages, answers and metrics count them; each node counts once."""

    idle: int = 0
    used: int = 0
    """Nodes that components of this scheduler hold, are promised, or have not released yet."""
    local: int = 0
    """Nodes of local users."""
    down: int = 0
    withheld: int = 0
    """Nodes that the resource manager keeps for others or for reservations."""
    unknown: int = 0
    """All nodes of a cluster with an outdated report: their present use is not known."""


@dataclass(slots=True, eq=False)
class ClusterStatus:
    """The state of one cluster."""

    name: ClusterName
    speed: float = 1.0
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    _: KW_ONLY
    contact: ContactStatus = field(default_factory=ContactStatus)
    health: HealthStatus = field(default_factory=HealthStatus)
    drained: Drain | None = None
    """The drain in force."""
    planned_drains: tuple[Drain, ...] = ()
    """Those that begin later, the earliest first."""
    uplink: UplinkUse = field(default_factory=UplinkUse)
    nodes: ClusterNodes = field(init=False)
    reported_at: float | None = None
    """When its agent last reported its nodes."""
    outdated_since: float | None = None
    """Since when the node counts may be outdated, as the agent is away or cannot query its resource manager. None after
    the next full report."""

    def __post_init__(self) -> None:
        self.nodes = ClusterNodes(self.health, self.uplink)

    @property
    def last_report(self) -> ClusterReport:
        return self.nodes.last_report

    def report(self, report: ClusterReport, now: float) -> None:
        """Store the agent's report of its nodes."""
        self.reported_at = now
        if not report.problem:
            self.outdated_since = None
        elif self.outdated_since is None:
            self.outdated_since = now
        self.nodes.report(report, self.speed)

    @property
    def lrm_silent_since(self) -> float | None:
        """Return when its resource manager last answered; None unless its agent reports that it does not answer."""
        report = self.last_report
        if self.reported_at is None or not (report.problem and report.silent_for):
            return None
        return self.reported_at - report.silent_for

    def known_at(self, now: float) -> float | None:
        """Return the time as of which the node counts are valid; None if they were never reported."""
        if not self.nodes.reported:
            return None
        return now if self.outdated_since is None else min(now, self.outdated_since)

    @property
    def node_use(self) -> NodeUse:
        """Return how its nodes are used now."""
        report = self.last_report
        if not self.nodes.reported or self.outdated_since is not None:
            return NodeUse(unknown=report.total)
        return NodeUse(self.nodes.idle, self.nodes.used, report.background, report.down, report.withheld)

    # Whether it may be used

    @property
    def has_agent(self) -> bool:
        """Return whether its agent is connected, even if its resource manager has not answered yet."""
        return self.contact.has_agent or self.contact.connected or bool(self.last_report.problem)

    @property
    def absence(self) -> str:
        """Return why its agent is not connected; empty if it is."""
        return "" if self.has_agent else self.contact.agent_failed or self.contact.disconnected_because

    @property
    def is_in_reach(self) -> bool:
        """Return whether its agent is connected and can use its resource manager."""
        return self.contact.connected and not self.last_report.problem

    @property
    def is_open(self) -> bool:
        """Return whether components may be placed here now; on probation only one trial at a time."""
        state = self.state
        return state is ClusterState.USABLE or (state is ClusterState.PROBATION and not self.health.trial_components)

    @property
    def state(self) -> ClusterState:
        """Return the condition that decides whether components may be placed here; an operator's drain comes first."""
        return self._state_without_drain if self.drained is None else ClusterState.DRAINED

    @property
    def _state_without_drain(self) -> ClusterState:
        if not self.contact.connected:
            return ClusterState.UNREACHABLE
        if self.health.unusable and not self.health.probation:
            return ClusterState.UNUSABLE
        if self.last_report.problem:
            return ClusterState.UNREACHABLE
        return ClusterState.PROBATION if self.health.unusable else ClusterState.USABLE

    @property
    def usable_from(self) -> float:
        """Return when the end of the drain in force makes it usable; infinity if nothing does, or it has no drain."""
        if self.drained is None or self._state_without_drain not in (ClusterState.USABLE, ClusterState.PROBATION):
            return inf
        return self.drained.until

    @property
    def state_reason(self) -> str:
        """Return why nothing is placed here, as all users may know it; empty if the cluster is usable."""
        if self.drained is not None:
            ends_at = self.drained.ends_at
            until = "" if ends_at is None else f", until {format_utc(ends_at, self.reported_at or 0.0)}"
            return f"{self.drained.author}{until}"
        if not self.contact.connected:
            return self.last_report.problem or self.absence or NO_REPORT_YET
        if self.health.unusable and not self.health.probation:
            return self.health.summary
        if self.last_report.problem:
            return self.last_report.problem
        return f"on probation, one component at a time; {self.health.summary}" if self.health.unusable else ""

    @property
    def moves_files(self) -> bool:
        return "rsync" not in self.last_report.lacks

    @property
    def capacity_restriction(self) -> str:
        """Return the limit or doubt that reduces the available nodes; empty without any."""
        return "; ".join(
            str(condition) for condition in (self.health.limit, self.health.doubt) if condition is not None
        )

    @property
    def status_text(self) -> str:
        """Return everything that an operator should know about the cluster in one line; empty if all is well."""
        missing = format_list(sorted(self.last_report.lacks))
        lacks = f"has no {missing}: no files come there from other clusters, and none go"
        return "; ".join(
            filter(
                None,
                (
                    self.state_reason,
                    self.capacity_restriction,
                    lacks if missing else "",
                    *self.reservation_texts,
                    *self.last_report.notices,
                ),
            )
        )

    @property
    def reservation_texts(self) -> list[str]:
        """Return the present and coming reservations of its nodes and its planned drains, as of the last report."""
        now = self.reported_at or 0.0
        drains = zip(self.nodes.drain_reservations, self.planned_drains, strict=False)  # none before jobs are restored
        texts = [reservation.describe(now) for reservation in self.nodes.reservations if not reservation.is_drain]
        return [*filter(None, texts), *(f"{reservation.describe(now)} {drain.author}" for reservation, drain in drains)]

    def view(self, idle: int, *, by_preemption: bool = False, hides_parts: bool = False) -> ClusterView:
        """Return the cluster as policies see it, with ``idle`` idle nodes. Probation is shown as usable or unusable.

        ``by_preemption``: the nodes that are not available yet may be of any class. ``hides_parts``: partly used nodes
        are not offered.
        """
        state, nodes = self.state, self.nodes
        if state is ClusterState.PROBATION:
            state = ClusterState.UNUSABLE if self.health.trial_components else ClusterState.USABLE
        note = "" if state is ClusterState.USABLE else self.state_reason
        classes = nodes.of_classes(min(idle, nodes.available) if by_preemption else idle)
        if by_preemption and classes and idle > nodes.available:
            freed = idle - nodes.available
            classes = resize_classes(classes, idle) if len(classes) == 1 else add_unclassified(classes, freed)
        parts = () if hides_parts or not nodes.last_report.shares else nodes.parts
        limits = None, nodes.last_report.job_sizes, nodes.reservations
        return ClusterView(self.name, nodes.last_report.total, idle, state, self.speed, note, classes, parts, *limits)
