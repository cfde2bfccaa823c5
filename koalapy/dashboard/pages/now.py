"""The page Now: how the grid stands at this moment, what is wrong first."""

from collections.abc import Sequence
from dataclasses import dataclass

from koalapy.dashboard.dashboard import Dashboard
from koalapy.dashboard.pictures.node_grid import NodeCounts
from koalapy.model.cluster import ClusterState
from koalapy.model.job import ComponentState
from koalapy.scheduling.cluster_status import ClusterStatus
from koalapy.scheduling.queries import Queries
from koalapy.service.services import Services

STALE_AFTER = 30.0
"""Seconds after which what was said of a cluster is shown as old."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One cluster: its nodes by what they do, and how it stands."""

    cluster: str
    kind: str
    state: str
    reason: str
    nodes: NodeCounts
    total: int
    heard_at: float | None
    """When it last spoke, in seconds since the epoch."""
    stale: bool
    waiting: int
    """Jobs that wait and might run there."""


@dataclass(frozen=True, slots=True)
class NowView:
    """The grid as it stands."""

    queued: int
    active: int
    nodes: int
    idle: int
    problems: Sequence[str]
    lanes: Sequence[Lane]


def node_counts(queries: Queries, cluster: ClusterStatus) -> NodeCounts:
    """A cluster's nodes, each counted once."""
    running = 0
    for token, size in cluster.live.items():
        found = queries.find(token)
        if found is not None and found[1].state is ComponentState.RUNNING:
            running += size
    running = min(running, cluster.used)
    return NodeCounts(
        running=running,
        claimed=cluster.used - running,
        local=cluster.background,
        down=cluster.down,
        idle=max(0, cluster.total - cluster.used - cluster.background - cluster.down),
    )


def add_now(dashboard: Dashboard, services: Services) -> None:
    """At ``/``."""
    engine = dashboard.engine

    @dashboard.page("/", "now.html", operation="list_clusters", title="Now", key="n")
    async def now() -> NowView:
        moment, queries = engine.clock(), engine.queries
        lanes = []
        for record in services.jobs.clusters():
            cluster = queries.grid[record.name]
            heard = cluster.contact.last_heard
            stale = heard is None or moment - heard > STALE_AFTER or not cluster.contact.connected
            lane = Lane(
                cluster=record.name,
                kind=record.kind,
                state=record.state,
                reason=record.reason,
                nodes=node_counts(queries, cluster),
                total=record.total,
                heard_at=heard,
                stale=stale,
                waiting=0,
            )
            lanes.append(lane)
        lanes.sort(key=lambda lane: (lane.state == ClusterState.USABLE, lane.cluster))
        return NowView(
            queued=engine.stored_queued,
            active=engine.stored_active,
            nodes=sum(lane.total for lane in lanes),
            idle=sum(lane.nodes.idle for lane in lanes if not lane.stale),
            problems=services.health.report().problems,
            lanes=lanes,
        )
