"""The map of the grid as SVG: clusters, measured links between them, and the running jobs that span several.

Up to ``MAX_RING`` clusters are on an ellipse, with all links between them. Of more clusters, those that co-allocated
jobs span are on the ellipse, with the links between them, and all others are in rows below, so that no line crosses
another cluster; those without a current report are small, and last. Names are left out where they would overlap.
Each shape links to the page with its details and has its numbers as its label.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, cos, hypot, log, pi, sin, sqrt
from operator import attrgetter
from urllib.parse import quote

from markupsafe import Markup, escape

from koalapy.dashboard.charts import NodeCounts
from koalapy.model.cluster import ClusterPair, pair_of
from koalapy.model.job import JobId
from koalapy.model.request import ClusterName
from koalapy.model.wording import shorten

MAX_RING = 16
"""Maximum number of clusters on the ellipse."""
MAX_NAMED = 80
"""Maximum number of clusters in rows that show their names."""
MAX_LABELLED_LINKS = 15
"""Maximum number of links that show their latency."""
MAX_DRAWN_JOBS = 40
WIDTH = 640
"""A map about as wide as high is readable on a phone."""
RING_HEIGHT, FLAT_RING_HEIGHT = 520, 360
"""Heights of the ellipse, and of one with at most ``FLAT_RING`` clusters."""
FLAT_RING, MIN_COLUMNS, STALE_COLUMNS = 4, 6, 24
LARGEST_RADIUS, SMALLEST_RADIUS = 36.0, 12.0
WIDEST_LINK, NARROWEST_LINK = 7.0, 1.0
JOB_COLOURS = 6
"""A job has the same one of the colours ``series-1`` to ``series-6`` in all pictures."""
MIN_BANDWIDTH_RATIO = 10.0
"""The scale of link widths spans at least this factor, so that similar links look similar."""

FormatNumber = Callable[[float | None], str]


@dataclass(frozen=True, slots=True)
class MapCluster:
    """A cluster of the map."""

    name: ClusterName
    state: str
    nodes: NodeCounts
    is_stale: bool


@dataclass(frozen=True, slots=True)
class MapLink:
    """The link between two clusters: the lower bandwidth and the higher latency of both directions."""

    pair: ClusterPair
    state: str
    bandwidth: float | None
    latency: float | None
    is_relayed: bool
    """Whether its connections pass through relays on the head nodes."""


@dataclass(frozen=True, slots=True)
class MapJob:
    """An active job that has nodes on several clusters."""

    id: JobId
    state: str
    nodes: Mapping[ClusterName, int]
    """Number of its nodes by cluster, the largest first."""


@dataclass(frozen=True, slots=True)
class GridMap:
    """The content of the map."""

    clusters: Sequence[MapCluster]
    """Sorted by name."""
    links: Sequence[MapLink]
    jobs: Sequence[MapJob]


def drawn_jobs(jobs: Sequence[MapJob]) -> list[MapJob]:
    """Return the jobs that the map shows: the first ones, as long as their clusters fit on the ellipse."""
    on_ellipse: set[ClusterName] = set()
    chosen: list[MapJob] = []
    for job in jobs:
        if len(chosen) < MAX_DRAWN_JOBS and len(on_ellipse | job.nodes.keys()) <= MAX_RING:
            on_ellipse |= job.nodes.keys()
            chosen.append(job)
    return chosen


def grid_map(content: GridMap, format_bandwidth: FormatNumber = str, format_latency: FormatNumber = str) -> Markup:
    """Return the map; empty without clusters. The formats are of a number, or None if it is unknown."""
    if not content.clusters:
        return Markup()
    jobs, is_small = drawn_jobs(content.jobs), len(content.clusters) <= MAX_RING
    spanned = {name for job in jobs for name in job.nodes}
    ring = [cluster for cluster in content.clusters if is_small or cluster.name in spanned]
    rows = sorted([one for one in content.clusters if one not in ring], key=attrgetter("is_stale"))
    places, height = _place(ring, rows)
    shared: Counter[ClusterName] = Counter(name for job in content.jobs for name in job.nodes)
    domain = _common_domain([cluster.name for cluster in content.clusters])
    links = [link for link in content.links if link.state != "unmeasured" and (is_small or spanned >= {*link.pair})]
    links.sort(key=lambda link: (-(link.bandwidth or 0.0), link.pair))
    parts = [
        f'<svg class="map" viewBox="0 0 {WIDTH} {round(height)}" width="{WIDTH}" height="{round(height)}" role="group" '
        f'aria-label="Map of {_count(len(content.clusters), "cluster")}; tables have the same values">',
        *_draw_links(links, places, format_bandwidth, format_latency),
        *_draw_jobs(jobs, places),
        *_draw_latencies(links, places, format_latency),
    ]
    for cluster in ring:
        name = shorten(cluster.name.removesuffix(domain), 18)
        parts.append(_draw_cluster(cluster, places[cluster.name], shared[cluster.name], name))
    parts.append('<g class="rows">')
    for cluster in rows:
        name = shorten(cluster.name.removesuffix(domain), 12) if len(rows) <= MAX_NAMED and not cluster.is_stale else ""
        parts.append(_draw_cluster(cluster, places[cluster.name], shared[cluster.name], name))
    parts.append("</g></svg>")
    return Markup("".join(parts))


@dataclass(frozen=True, slots=True)
class Place:
    """The centre and the radius of a cluster's disc."""

    x: float
    y: float
    radius: float


def _place(ring: Sequence[MapCluster], rows: Sequence[MapCluster]) -> tuple[dict[ClusterName, Place], float]:
    """Return the places of the clusters on the ellipse and in rows below it, and the height of the map."""
    largest = max(1, *(cluster.nodes.total for cluster in (*ring, *rows)))

    def radius(cluster: MapCluster, limit: float) -> float:
        return max(min(SMALLEST_RADIUS, limit / 2), limit * sqrt(cluster.nodes.total / largest))

    places, number, height = {}, len(ring), 0.0
    if number:
        height = float(FLAT_RING_HEIGHT if number <= FLAT_RING else RING_HEIGHT)
        horizontal, vertical = (0.0, 0.0) if number == 1 else (WIDTH / 2 - 80, height / 2 - 70)
        # Beside each other at the left and right there is room for a disc with its name below.
        limit = min(LARGEST_RADIUS, (height if number == 1 else vertical * sin(2 * pi / max(4, number)) - 24) / 2)
        for index, cluster in enumerate(ring):
            # The first cluster is at the left, so that two or three clusters share the width.
            angle = pi + 2 * pi * index / number
            x, y = WIDTH / 2 + horizontal * cos(angle), height / 2 - 8 + vertical * sin(angle)
            places[cluster.name] = Place(x, y, radius(cluster, limit))
    for is_stale, band in groupby(rows, attrgetter("is_stale")):
        clusters = list(band)
        columns = max(STALE_COLUMNS if is_stale else MIN_COLUMNS, ceil(sqrt(len(clusters) * 0.9)))
        cell = WIDTH / columns
        row_height = cell * 0.8 + (16 if len(rows) <= MAX_NAMED and not is_stale else 2)
        for index, cluster in enumerate(clusters):
            x, y = (index % columns + 0.5) * cell, height + (index // columns) * row_height + cell * 0.4
            places[cluster.name] = Place(x, y, radius(cluster, cell * 0.34))
        height += ceil(len(clusters) / columns) * row_height
    return places, height


def _common_domain(names: Sequence[ClusterName]) -> str:
    """Return the end of all names from their first dot, which labels leave out; empty if it differs."""
    domains = {name[name.find(".") :] if name.find(".") > 0 else "" for name in names}
    return domains.pop() if len(domains) == 1 else ""


def _draw_latencies(
    links: Sequence[MapLink], places: Mapping[ClusterName, Place], format_latency: FormatNumber
) -> Iterator[str]:
    """Yield the latency on each link, if there are few links."""
    for link in links if len(links) <= MAX_LABELLED_LINKS else ():
        if link.latency is not None:
            one, other = (places[name] for name in link.pair)
            # Off the middle, where lines between opposite clusters cross.
            x, y = one.x + (other.x - one.x) * 0.38, one.y + (other.y - one.y) * 0.38
            yield f'<text class="latency" x="{x:.1f}" y="{y + 4:.1f}">{escape(format_latency(link.latency))}</text>'


def _draw_links(
    links: Sequence[MapLink],
    places: Mapping[ClusterName, Place],
    format_bandwidth: FormatNumber,
    format_latency: FormatNumber,
) -> Iterator[str]:
    """Yield each link as a line."""
    bandwidths = [link.bandwidth for link in links if link.bandwidth]
    highest, lowest = max(bandwidths, default=1.0), min(bandwidths, default=1.0)
    span = max(log(highest / lowest), log(MIN_BANDWIDTH_RATIO))
    for link in links:
        one, other = (places[name] for name in link.pair)
        share = 0.0 if not link.bandwidth else 1 - log(highest / link.bandwidth) / span
        width = NARROWEST_LINK + share * (WIDEST_LINK - NARROWEST_LINK)
        kind = escape(f"link{' relayed' if link.is_relayed else ''} {link.state}")
        label = escape(
            f"{link.pair[0]} – {link.pair[1]}: unreachable"
            if link.state == "unreachable"
            else f"{link.pair[0]} – {link.pair[1]}: {format_bandwidth(link.bandwidth)}, "
            f"{format_latency(link.latency)}{', relayed' if link.is_relayed else ''}, {link.state}"
        )
        line = f'x1="{one.x:.1f}" y1="{one.y:.1f}" x2="{other.x:.1f}" y2="{other.y:.1f}"'
        path = f"/network/{quote(link.pair[0], safe='')}/{quote(link.pair[1], safe='')}"
        # The wide transparent line is what a pointer hits.
        yield (
            f'<a href="{path}" aria-label="{label}"><title>{label}</title><line class="hit" {line}/>'
            f'<line class="{kind}" {line} stroke-width="{width:.1f}"/></a>'
        )


def _draw_jobs(jobs: Sequence[MapJob], places: Mapping[ClusterName, Place]) -> Iterator[str]:
    """Yield each job as curves from its largest component to the others. Jobs of one pair of clusters are apart."""
    drawn: Counter[ClusterPair] = Counter()
    for job in jobs:
        first, *others = job.nodes
        sizes = ", ".join(f"{size} on {name}" for name, size in job.nodes.items())
        label = escape(f"job {job.id}, {job.state}: {_count(sum(job.nodes.values()), 'node')}, {sizes}")
        curves = []
        for other in others:
            pair = pair_of(first, other)
            drawn[pair] += 1
            (x1, y1), (x2, y2) = ((places[name].x, places[name].y) for name in pair)
            # Alternately to both sides of the link, farther out with each job.
            step = 26.0 * ((drawn[pair] + 1) // 2) * (1 if drawn[pair] % 2 else -1)
            length = hypot(x2 - x1, y2 - y1) or 1.0
            x, y = (x1 + x2) / 2 - (y2 - y1) / length * step, (y1 + y2) / 2 + (x2 - x1) / length * step
            curves.append(f"M{x1:.1f} {y1:.1f}Q{x:.1f} {y:.1f} {x2:.1f} {y2:.1f}")
        yield (
            f'<a href="/jobs/{job.id}" aria-label="{label}"><title>{label}</title>'
            f'<path class="job series-{job.id % JOB_COLOURS + 1}" d="{" ".join(curves)}"/></a>'
        )


def describe_cluster(cluster: MapCluster, shared_jobs: int) -> str:
    """Return the numbers of a cluster in one line."""
    stale = ", as last reported" if cluster.is_stale else ""
    shared = f"; {_count(shared_jobs, 'job')} with other clusters" if shared_jobs else ""
    return f"{cluster.name}, {cluster.state}: {_count(cluster.nodes.total, 'node')}, {cluster.nodes}{stale}{shared}"


def _draw_cluster(cluster: MapCluster, place: Place, shared_jobs: int, name: str) -> str:
    """Return a disc with an arc for the nodes of each state, from the top clockwise, and the share of used nodes."""
    x, y, radius, label = place.x, place.y, place.radius, escape(describe_cluster(cluster, shared_jobs))
    classes = escape(f"cluster {cluster.state}{' stale' if cluster.is_stale else ''}")
    parts = [
        f'<a class="{classes}" href="/clusters/{quote(cluster.name, safe="")}" aria-label="{label}">'
        f'<title>{label}</title><circle class="disc" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
    ]
    total, offset, thick = cluster.nodes.total, 0.0, radius * 0.36
    for kind, count in cluster.nodes.by_state.items():
        if count and kind != "idle":
            share = 100 * count / total
            parts.append(
                f'<circle class="arc {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius - thick / 2:.1f}"'
                f' stroke-width="{thick:.1f}" pathLength="100" stroke-dasharray="{share:.2f} 100"'
                f' stroke-dashoffset="{-offset:.2f}" transform="rotate(-90 {x:.1f} {y:.1f})"/>'
            )
            offset += share
    if radius >= 20 and total:
        text = "?" if cluster.nodes.unknown else f"{100 * (cluster.nodes.ours + cluster.nodes.local) / total:.0f}%"
        parts.append(f'<text class="share" x="{x:.1f}" y="{y + 3.5:.1f}">{text}</text>')
    if name:
        parts.append(f'<text class="name" x="{x:.1f}" y="{y + radius + 13:.1f}">{escape(name)}</text>')
    parts.append("</a>")
    return "".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
