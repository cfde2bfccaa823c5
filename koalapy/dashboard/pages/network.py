"""The pages of the network: the map, a heat map of all links, and the history of one link."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement
from math import log
from typing import Annotated
from urllib.parse import quote

from fastapi import Query
from markupsafe import escape

from koalapy.api.network import Name
from koalapy.daemon.network.links import LinkState
from koalapy.daemon.network.network import LinkRecord
from koalapy.daemon.services import Services
from koalapy.dashboard.charts import Chart, Curve, Unit
from koalapy.dashboard.dashboard import Dashboard, SentForm, View
from koalapy.dashboard.grid_map import MAX_RING, MapJob, MapLink, drawn_jobs
from koalapy.dashboard.rendering import format_rate, format_seconds
from koalapy.dashboard.rows import Survey, cluster_row
from koalapy.model.cluster import pair_of
from koalapy.model.job import Job
from koalapy.model.measurement import MeasurementKind
from koalapy.model.request import ClusterName
from koalapy.scheduler.queries import Queries

STEPS = 5
"""Number of shades of the heat map."""
MAX_COMPLETE = 12
"""Number of clusters up to which those without a known link have a row, too."""
MAX_JOBS = 200
"""Maximum number of listed jobs on several clusters."""
Limit = Annotated[int, Query(ge=1, le=1000, description="maximum number of measurements")]


@dataclass(frozen=True, slots=True)
class LinkDirection:
    """The network from one cluster to another, or within one; seconds and bytes per second."""

    source: ClusterName
    target: ClusterName
    state: LinkState
    bandwidth: float | None
    latency: float | None
    step: int
    """Shade of its bandwidth from 1 to ``STEPS``; 0 if unknown."""
    under_way: bool
    """Whether its measurement is queued or running."""
    relayed: bool
    """Whether MPI messages go over relays now."""

    def __html__(self) -> str:
        """Return its cell of the heat map. A grid of 60 clusters may have 3,600 of them."""
        if self.state is LinkState.UNREACHABLE:
            text = "not measured" if self.relayed else "unreachable"
        elif self.bandwidth is None and self.latency is None:
            text = '–<span class="hidden">not measured</span>'
        else:
            text = f"{format_rate(self.bandwidth)}<br><small>{format_seconds(self.latency)}</small>"
            if self.state is LinkState.STALE:
                text += ' <span class="stale">stale</span>'
        if self.relayed:
            text += "<small>relayed</small>"
        if self.under_way:
            text += "<small>being measured</small>"
        (source, source_path), (target, target_path) = _name_forms(self.source), _name_forms(self.target)
        return (
            f'<td class="step{self.step} {self.state}"><a href="/network/{source_path}/{target_path}">'
            f'<span class="hidden">{source} to {target}: </span>{text}</a></td>'
        )


CHART_UNITS: dict[str, Unit] = {"Bandwidth": "rate", "Latency": "seconds"}
"""The charts of the page of a link, and their units."""


def link_directions(records: Sequence[LinkRecord]) -> Mapping[tuple[ClusterName, ClusterName], LinkDirection]:
    """Return both directions of all links by source and target."""
    links = {}
    for record in records:
        first, second = record.pair
        links[first, second] = (record, record.link)
        links[second, first] = (record, record.link if first == second else record.measurements.link_back)
    bandwidths = [link.bandwidth for _, link in links.values() if link.bandwidth]
    low, high = min(bandwidths, default=1.0), max(bandwidths, default=1.0)
    return {
        pair: LinkDirection(
            *pair,
            state=record.state,
            bandwidth=link.bandwidth,
            latency=link.latency,
            step=choose_shade(link.bandwidth, low, high),
            under_way=record.under_way is not None,
            relayed=record.is_relayed,
        )
        for pair, (record, link) in links.items()
    }


def choose_shade(bandwidth: float | None, low: float, high: float) -> int:
    """Return the shade of a bandwidth on a logarithmic scale. The scale spans at least a factor of ten, so that similar
    links get similar shades."""
    if not bandwidth:
        return 0
    span = max(log(high) - log(low), log(10))
    share = 1 - (log(high) - log(bandwidth)) / span
    return min(STEPS, 1 + int(share * STEPS))


def notes_of(records: Sequence[LinkRecord]) -> list[tuple[ClusterName, ClusterName, str]]:
    """Return what the table of links cannot show: measurements under way and errors, by pair of clusters."""
    notes = []
    for record in records:
        if record.under_way is not None:
            job = record.under_way.job
            notes.append((*record.pair, "measurement queued" if job is None else f"measured now by job {job}"))
        if record.relayed is not None:
            notes.append((*record.pair, f"relayed: {record.relayed.reason}"))
        if record.measurements.error:
            problem = "unreachable" if record.state is LinkState.UNREACHABLE else "the last measurement failed"
            notes.append((*record.pair, f"{problem}: {record.measurements.error}"))
    return notes


@lru_cache(1000)
def _name_forms(name: ClusterName) -> tuple[str, str]:
    """Return a name as HTML and as part of a path."""
    return str(escape(name)), quote(name, safe="")


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


def make_map(services: Services, survey: Survey, queries: Queries, now: float, jobs: Sequence[MapJob]) -> View:
    """Return the map of all clusters, the known links between those that it can show, and the first of the jobs."""
    records = sorted(services.jobs.list_clusters(), key=lambda record: record.name)
    clusters = [cluster_row(queries.grid[record.name], record, survey, now) for record in records]
    linked = {row.cluster for row in clusters}
    if len(clusters) > MAX_RING:
        linked &= {name for job in drawn_jobs(jobs) for name in job.nodes}
    links = [
        map_link(record)
        for record in services.network.list_known_links()
        if record.pair[0] != record.pair[1] and record.state != "unmeasured" and linked.issuperset(record.pair)
    ]
    return {"clusters": clusters, "links": links, "jobs": jobs}


def add_network(dashboard: Dashboard, services: Services, survey: Survey) -> None:
    """Add the pages of all links and of one link, and the form that measures them."""
    network, queries = services.network, dashboard.engine.queries

    @dashboard.page("/network", "network.html", operation="show_network", title="Network", key="l")
    async def matrix() -> View:
        """Return the map, and the newest measurement of each pair of clusters and within each cluster."""
        names, omitted = network.cluster_names, list[ClusterName]()
        if len(names) > MAX_COMPLETE:
            unmeasured, known = LinkState.UNMEASURED, network.list_known_links()
            known = [one for one in known if one.state is not unmeasured or one.under_way is not None]
            with_link = {name for record in known for name in record.pair}
            omitted = [name for name in names if name not in with_link]
            names = [name for name in names if name in with_link]
        records = network.list_links(combinations_with_replacement(names, 2))
        links = link_directions(records)
        jobs = coallocated_jobs(queries)
        shown = jobs[:MAX_JOBS]
        return {
            "map": make_map(services, survey, queries, dashboard.engine.clock(), shown),
            # Active jobs with nodes on several clusters, and those that the map shows
            "job_count": len(jobs),
            "drawn_jobs": len(drawn_jobs(shown)),
            "clusters": names,
            # The links by source and target
            "rows": [[links[source, target] for target in names] for source in names],
            "stale_after": network.stale_after,
            "notes": notes_of(records),
            # Clusters without a known link, which have no row
            "omitted": omitted,
        }

    @dashboard.page("/network/{one}/{other}", "link.html", operation="show_link_history", title="Link")
    async def link(one: Name, other: Name, limit: Limit = 100) -> View:
        """Return the state of a link and its last measurements; raise ``NotFoundError`` for an unknown cluster."""
        measurements = await network.read_history(one, other, limit)
        pair = pair_of(one, other)
        (record,) = network.list_links([pair])
        conclusive = [m for m in reversed(measurements) if m.kind is not MeasurementKind.INCONCLUSIVE]
        times = [m.at for m in conclusive]
        return {
            "record": record,
            "rejection_reason": network.rejection_reason(pair),
            "measurements": measurements,
            # Measured ``bandwidth`` in bytes per second and ``latency`` in seconds, oldest first
            "charts": [
                Chart(name, times, 60.0, [Curve("", [getattr(m, name.lower()) for m in conclusive])], unit)
                for name, unit in CHART_UNITS.items()
            ],
        }

    @dashboard.action("/network/measure", operation="measure_network")
    async def measure(form: SentForm) -> str:
        """Measure all links, or the one that the form names."""
        await network.wait_for_agents()
        first, second = form.get("one"), form.get("other")
        if first or second:
            network.measure_links(pairs=[(first, second)])
            return f"/network/{quote(first, safe='')}/{quote(second, safe='')}"
        network.measure_links()
        return "/network"
