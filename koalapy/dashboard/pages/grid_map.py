"""The page Map: clusters, the links between them, and the running jobs that span several clusters."""

from collections.abc import Sequence
from dataclasses import dataclass

from koalapy.daemon.network.network import LinkRecord
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard
from koalapy.dashboard.grid_map import MAX_RING, GridMap, MapCluster, MapJob, MapLink, drawn_jobs
from koalapy.dashboard.rows import Survey, node_counts
from koalapy.model.cluster import ClusterState
from koalapy.model.job import Job
from koalapy.scheduler.queries import Queries

MAX_LINKS = 200
"""Maximum number of links in the table, those between clusters on the ellipse first."""
MAX_JOBS = 200


@dataclass(frozen=True, slots=True)
class MapView:
    """The map, and the same values as tables."""

    map: GridMap
    nodes: int
    used: int
    link_count: int
    """Number of measured or configured links."""
    links: Sequence[MapLink]
    """The first of them, for the table."""
    job_count: int
    """Number of active jobs with nodes on several clusters."""
    drawn_jobs: int
    has_all_links: bool
    """Whether the picture has all links."""


def coallocated_jobs(queries: Queries) -> list[MapJob]:
    """Return the active jobs that have nodes on several clusters, the largest first."""
    jobs = []
    for job in queries.active_jobs():
        nodes = _nodes_by_cluster(job)
        if len(nodes) > 1:
            largest_first = dict(sorted(nodes.items(), key=lambda item: (-item[1], item[0])))
            jobs.append(MapJob(job.id, str(job.state), largest_first))
    return sorted(jobs, key=lambda job: (-sum(job.nodes.values()), job.id))


def _nodes_by_cluster(job: Job) -> dict[str, int]:
    """Return the number of nodes that a job has or claims, by cluster."""
    nodes: dict[str, int] = {}
    for component in job.attempt.gang if job.attempt is not None else ():
        if not component.has_ended:
            nodes[component.cluster] = nodes.get(component.cluster, 0) + component.size
    return nodes


def map_link(record: LinkRecord) -> MapLink:
    """Return a link with the worse values of both directions."""
    both = (record.link, record.measurements.link_back)
    return MapLink(
        record.pair,
        str(record.state),
        min((link.bandwidth for link in both if link.bandwidth), default=None),
        max((link.latency for link in both if link.latency is not None), default=None),
        is_relayed=record.is_relayed,
    )


def add_map(dashboard: Dashboard, services: Services, survey: Survey) -> None:
    """Add the page with the map of the grid."""
    engine, queries = dashboard.engine, dashboard.engine.queries

    @dashboard.page("/map", "map.html", operation="show_network", title="Map", key="m")
    async def show() -> MapView:
        """Return all clusters, the known links, and the jobs that span clusters."""
        now = engine.clock()
        clusters = []
        for record in services.jobs.list_clusters():
            status = queries.grid[record.name]
            is_stale = status.known_at(now) != now
            clusters.append(MapCluster(record.name, record.state, node_counts(status, survey), is_stale))
        clusters.sort(key=lambda cluster: cluster.name)
        names = {cluster.name for cluster in clusters}
        jobs = [job for job in coallocated_jobs(queries) if names.issuperset(job.nodes)]
        drawn = drawn_jobs(GridMap(clusters, [], jobs))
        spanned = {name for job in drawn for name in job.nodes}
        links = [
            map_link(record)
            for record in services.network.list_known_links()
            if record.pair[0] != record.pair[1] and record.state != "unmeasured" and names.issuperset(record.pair)
        ]
        links.sort(key=lambda link: (not spanned.issuperset(link.pair), link.bandwidth or 0.0))
        current = [cluster for cluster in clusters if cluster.state != ClusterState.UNREACHABLE]
        return MapView(
            map=GridMap(clusters, links if len(clusters) <= MAX_RING else links[:MAX_LINKS], jobs[:MAX_JOBS]),
            nodes=sum(cluster.nodes.total for cluster in current),
            used=sum(cluster.used for cluster in current),
            link_count=len(links),
            links=links[:MAX_LINKS],
            job_count=len(jobs),
            drawn_jobs=len(drawn),
            has_all_links=len(clusters) <= MAX_RING,
        )
