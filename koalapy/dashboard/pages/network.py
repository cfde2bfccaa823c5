"""The pages of the network: the map, a heat map of all links, and the history of one link."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from math import log
from typing import Annotated
from urllib.parse import quote

from fastapi import Query
from markupsafe import Markup, escape

from koalapy.api.network import Name
from koalapy.daemon.network.links import LinkState
from koalapy.daemon.network.network import LinkRecord
from koalapy.daemon.services import Services
from koalapy.dashboard.charts import Chart, Curve, Unit
from koalapy.dashboard.dashboard import Dashboard, SentForm, View
from koalapy.dashboard.grid_map import MAX_RING, MapJob, drawn_jobs
from koalapy.dashboard.rendering import ENVIRONMENT, format_rate, format_seconds
from koalapy.dashboard.rows import Survey, cluster_row
from koalapy.model.cluster import Link, pair_of
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


CHART_UNITS: dict[str, Unit] = {"Bandwidth": "rate", "Latency": "seconds"}
"""The charts of the page of a link, and their units."""


def heat_rows(links: Sequence[LinkRecord], names: Sequence[ClusterName]) -> Iterator[tuple[ClusterName, Markup]]:
    """Yield each cluster with its row of the heat map: the cells of the links to all clusters."""
    directions = {record.pair: (record, record.link) for record in links}
    directions |= {record.pair[::-1]: (record, record.measurements.link_back) for record in links} | directions
    bandwidths = [link.bandwidth for _, link in directions.values() if link.bandwidth]
    low, high = min(bandwidths, default=1.0), max(bandwidths, default=1.0)
    forms = {name: (escape(name), quote(name, safe="")) for name in names}
    for source in names:
        cells = []
        for target in names:
            record, link = directions[source, target]
            step = choose_shade(link.bandwidth, low, high)
            cells.append(_draw_cell(record, link, step, *forms[source], *forms[target]))
        yield source, Markup("".join(cells))


ENVIRONMENT.globals["heat_rows"] = heat_rows


def _draw_cell(
    record: LinkRecord, link: Link, step: int, source: str, source_path: str, target: str, target_path: str
) -> str:
    """Return a cell of the heat map in a shade. A grid of 60 clusters may have 3,600, so no template draws them."""
    if record.state is LinkState.UNREACHABLE:
        text = "not measured" if record.is_relayed else "unreachable"
    elif link.bandwidth is None and link.latency is None:
        text = '–<span class="hidden">not measured</span>'
    else:
        text = f"{format_rate(link.bandwidth)}<br><small>{format_seconds(link.latency)}</small>"
        if record.state is LinkState.STALE:
            text += ' <span class="stale">stale</span>'
    if record.is_relayed:
        text += "<small>relayed</small>"
    if record.under_way is not None:
        text += "<small>being measured</small>"
    return (
        f'<td class="step{step} {record.state}"><a href="/network/{source_path}/{target_path}">'
        f'<span class="hidden">{source} to {target}: </span>{text}</a></td>'
    )


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


def coallocated_jobs(queries: Queries) -> list[MapJob]:
    """Return the active jobs that have or claim nodes on several clusters, the largest first."""
    jobs = []
    for job in queries.active_jobs():
        nodes = Counter[ClusterName]()
        for component in job.attempt.gang if job.attempt is not None else ():
            if not component.has_ended:
                nodes[component.cluster] += component.size
        if len(nodes) > 1:
            largest_first = dict(sorted(nodes.items(), key=lambda item: (-item[1], item[0])))
            jobs.append(MapJob(job.id, str(job.state), largest_first))
    return sorted(jobs, key=lambda job: (-sum(job.nodes.values()), job.id))


def add_network(dashboard: Dashboard, services: Services, survey: Survey) -> None:
    """Add the pages of all links and of one link, and the form that measures them."""
    network, queries = services.network, dashboard.engine.queries

    @dashboard.page("/network", "network.html", operation="show_network", title="Network", key="l")
    async def matrix() -> View:
        """Return the map, and the newest measurement of each pair of clusters and within each cluster."""
        names, omitted = network.cluster_names, list[ClusterName]()
        if len(names) > MAX_COMPLETE:
            unmeasured, links = LinkState.UNMEASURED, network.list_known_links()
            links = [record for record in links if record.state is not unmeasured or record.under_way is not None]
            with_link = {name for record in links for name in record.pair}
            omitted = [name for name in names if name not in with_link]
            names = [name for name in names if name in with_link]
        records = network.list_links(combinations_with_replacement(names, 2))
        jobs = coallocated_jobs(queries)
        shown_jobs, now = jobs[:MAX_JOBS], dashboard.engine.clock()
        clusters = sorted(services.jobs.list_clusters(), key=lambda cluster: cluster.name)
        linked = {cluster.name for cluster in clusters}
        if len(clusters) > MAX_RING:
            linked &= {name for job in drawn_jobs(shown_jobs) for name in job.nodes}
        return {
            # All clusters, the known links between those that the map can link, and the first of the jobs
            "map": {
                "clusters": [cluster_row(queries.grid[record.name], record, survey, now) for record in clusters],
                "links": [
                    link
                    for link in network.list_known_links()
                    if link.pair[0] != link.pair[1] and link.state != "unmeasured" and linked.issuperset(link.pair)
                ],
                "jobs": shown_jobs,
            },
            # Active jobs with nodes on several clusters, and those that the map shows
            "job_count": len(jobs),
            "drawn_jobs": len(drawn_jobs(shown_jobs)),
            "clusters": names,
            "links": records,
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
