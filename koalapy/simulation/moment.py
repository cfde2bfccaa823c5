"""A snapshot of a live grid, from which a simulation can start."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from koalapy.model.cluster import Relays
from koalapy.model.job import ComponentState, Job, JobState
from koalapy.model.job_sizes import NodeReservation, SizeRanges
from koalapy.model.request import ClusterName
from koalapy.policies.registry import Registry
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.queries import Queries
from koalapy.scheduler.queue.eligibility import placement_limit
from koalapy.scheduler.scheduler import Scheduler
from koalapy.simulation.record.format import Beginning, KnownCluster, People
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid

HAVE_NODES = frozenset({ComponentState.CLAIMED, ComponentState.RUNNING, ComponentState.STOPPING})
IN_QUEUE = frozenset({ComponentState.SUBMITTED, ComponentState.WAITING})
"""States of components in the queue of their resource manager, as last reported."""


@dataclass(frozen=True, slots=True)
class NodesNow:
    """Nodes of a connected cluster at the time of the snapshot."""

    total: int
    background: int = 0
    down: int = 0
    overlap: int = 0
    """By how much the sizes of components exceed the nodes that they have, as jobs share some."""
    startup: float = 0.0
    """Start-up time in seconds.

    It is the time from the submission of a component, with enough idle nodes, until all its runners have reported.
    """
    reservations: tuple[NodeReservation, ...] = ()
    """Present and coming reservations. Nodes that components have, or that become idle at the end, count as idle."""
    job_sizes: SizeRanges = ()
    has_relay: bool = False
    relayed_only: bool = False
    """Whether it accepts MPI messages of other sites only over relays."""


@dataclass(frozen=True)
class Moment:
    """A snapshot of a scheduler's state, and of the nodes of the clusters that report to it."""

    beginning: Beginning
    nodes: Mapping[ClusterName, NodesNow] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return self.beginning.now

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Return the unfinished jobs, except those that are held, since it is unknown when these are released."""
        return tuple(job for job in self.beginning.jobs if job.state is not JobState.HELD)

    def create_grid(self) -> SimulatedGrid:
        """Return a simulated grid with the clusters and links of the snapshot; each cluster has at least one node."""
        clusters = {}
        for cluster in self.beginning.clusters:
            nodes = self.nodes.get(cluster.name) or NodesNow(cluster.total)
            clusters[cluster.name] = SimulatedCluster(
                max(1, nodes.total), cluster.speed, cluster.profile, startup=nodes.startup
            )
        return SimulatedGrid(clusters, {(first, second): link for first, second, link in self.beginning.links})

    def create_scheduler(self, policies: Registry, *, keeps_effects: bool, max_starts: int | None = None) -> Scheduler:
        """Return a scheduler with all jobs of the snapshot. Its clusters are unreachable until they report.

        ``max_starts``: number of attempts after which a step leaves the remaining jobs to the next one; None: no limit.
        """
        attempts = 0

        def create_nonce() -> str:
            nonlocal attempts
            attempts += 1
            return f"twin{attempts:012x}"

        def clock() -> float:
            return attempts / (max_starts or 1) * self.beginning.rules.step_budget

        return self.beginning.make_scheduler(
            policies, create_nonce, None if max_starts is None else clock, keeps_effects=keeps_effects
        )


def moment_of(queries: Queries, people: People, now: float) -> Moment:
    """Return a snapshot of the state of a scheduler. ``now`` is in seconds since 1970 (UTC)."""
    grid, shares = queries.grid, queries.owner_use.shares
    statuses = grid.clusters()
    clusters = tuple(
        KnownCluster(
            status.name,
            status.speed,
            status.profile,
            status.last_report.total,
            status.health.errors,
            status.uplink.bandwidth,
            unusable=status.health.unusable,
            note=status.health.note,
            trials=status.health.trials,
            drained=status.drained,
            planned_drains=status.planned_drains,
        )
        for status in statuses
    )
    view = grid.view()
    return Moment(
        Beginning(
            queries.rules,
            tuple(queries.policies.names()),
            clusters,
            tuple((first, second, link) for (first, second), link in view.links.items()),
            tuple(queries.experience.runs()),
            people if shares is None else replace(people, fair_share=shares.settings),
            dict(view.replicas),
            tuple(_with_all_tries(job, queries) for job in queries.jobs()),
            now=now,
            streams=grid.relays.streams,
            link_uses=tuple((first, second, use) for (first, second), use in grid.relays.uses.items()),
            reservations=queries.reservations.all(),
        ),
        {
            status.name: _nodes_of(status, grid.relays, now)
            for status in statuses
            if status.contact.connected and status.last_report.total
        },
    )


def _with_all_tries(job: Job, queries: Queries) -> Job:
    """Return a job whose tries include the scans that passed it over, since a simulation counts scans from 0."""
    if not job.is_in_queue or placement_limit(job, queries.rules) is None:
        return job
    return replace(job, placement_tries=queries.queues.tries(job), counted_scan=0)


def _nodes_of(status: ClusterStatus, relays: Relays, now: float) -> NodesNow:
    """Return the nodes of a connected cluster.

    Nodes of a reservation in force that none of its jobs has are reported as background. They count as idle here, and
    the reservation keeps them from jobs until its end.
    """
    report, reservations = status.last_report, []
    background = report.background + report.withheld
    for entry in report.reservations:
        if entry.begins <= now < entry.ends:
            unknown = entry.nodes - entry.idle - status.nodes.count_reserved(entry.name, held=True)
            kept = max(0, min(unknown, background))
            background -= kept
            entry = replace(entry, idle=entry.idle + kept)
        reservations.append(entry)
    unavailable = background + report.down
    return NodesNow(
        report.total,
        background,
        report.down,
        _count_overlap(status) if report.shares else 0,
        status.health.evidence.mean_wait(now),
        tuple(replace(entry, idle=max(entry.idle, entry.nodes - unavailable)) for entry in reservations),
        report.job_sizes,
        status.name in relays.ready,
        status.name in relays.relayed_only,
    )


def _count_overlap(status: ClusterStatus) -> int:
    """Return by how much the sizes of components exceed the nodes that they have, by the last report."""
    held_nodes = sum(size for token, size in status.nodes.live.items() if status.nodes.holds(token))
    unavailable = status.last_report.background + status.last_report.withheld + status.last_report.down
    return max(0, held_nodes - (status.last_report.total - unavailable - status.last_report.idle))
