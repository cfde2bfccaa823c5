"""The layout of the grid's map: clusters, measured links between them, and the running jobs that span several.

Up to ``MAX_RING`` clusters are on an ellipse, with all links between them. Of more clusters, those of
co-allocated jobs are on the ellipse, with the links between them. All others are in rows below, so that no line crosses
a cluster. Clusters without a current report are small, and last. ``parts/map.html`` draws the map as SVG.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, cos, hypot, log, pi, sin, sqrt
from typing import Any

from koalapy.daemon.network.network import LinkRecord
from koalapy.dashboard.rows import ClusterRow
from koalapy.model.cluster import ClusterPair, Link, pair_of
from koalapy.model.job import JobId
from koalapy.model.request import ClusterName
from koalapy.model.wording import shorten

MAX_RING = 16
"""Maximum number of clusters on the ellipse."""
MAX_NAMED = 80
"""Maximum number of clusters in rows that show their names."""
MAX_DRAWN_JOBS = 40
WIDTH = 640
"""A map about as wide as high is readable on a phone."""
RING_HEIGHT, FLAT_RING_HEIGHT = 520, 360
"""Heights of the ellipse, and of one with at most ``FLAT_RING`` clusters."""
FLAT_RING, MIN_COLUMNS, STALE_COLUMNS = 4, 6, 24
LARGEST_RADIUS, SMALLEST_RADIUS = 36.0, 12.0
WIDEST_LINK, NARROWEST_LINK = 7.0, 1.0
MIN_BANDWIDTH_RATIO = 10.0
"""The scale of link widths spans at least this factor, so that similar links look similar."""

Disc = tuple[float, float, float]
"""The centre and the radius of a cluster's disc."""


@dataclass(frozen=True, slots=True)
class MapJob:
    """An active job that has nodes on several clusters."""

    id: JobId
    state: str
    nodes: Mapping[ClusterName, int]
    """Number of its nodes by cluster, the largest first."""


def drawn_jobs(jobs: Sequence[MapJob]) -> list[MapJob]:
    """Return the jobs that the map shows: the first ones, as long as their clusters fit on the ellipse."""
    on_ellipse: set[ClusterName] = set()
    chosen: list[MapJob] = []
    for job in jobs:
        if len(chosen) < MAX_DRAWN_JOBS and len(on_ellipse | job.nodes.keys()) <= MAX_RING:
            on_ellipse |= job.nodes.keys()
            chosen.append(job)
    return chosen


def lay_out_map(clusters: Sequence[ClusterRow], links: Sequence[LinkRecord], jobs: Sequence[MapJob]) -> dict[str, Any]:
    """Return what the map of these clusters draws, with positions in pixels: ``links`` are between those clusters that
    ``drawn_jobs`` span, or all clusters of a small grid."""
    jobs_to_draw, is_small = drawn_jobs(jobs), len(clusters) <= MAX_RING
    spanned = {name for job in jobs_to_draw for name in job.nodes}
    ring = [row for row in clusters if is_small or row.cluster in spanned]
    off_ring = [row for row in clusters if not is_small and row.cluster not in spanned]
    discs, height = _place(ring, off_ring)
    domain = _common_domain([row.cluster for row in clusters])
    return {
        "width": WIDTH,
        "height": round(height),
        "count": len(clusters),
        # Each with its values, both discs and its width, the fastest ones first
        "links": list(_place_links(links, discs)),
        # Each with its path
        "jobs": list(_curve_jobs(jobs_to_draw, discs)),
        # The number of jobs on several clusters, by cluster
        "shared": Counter(name for job in jobs for name in job.nodes),
        # The clusters on the ellipse and in rows, each with its disc and its label
        "ring": [(row, discs[row.cluster], shorten(row.cluster.removesuffix(domain), 18)) for row in ring],
        "rows": [(row, discs[row.cluster], shorten(row.cluster.removesuffix(domain), 12)) for row in off_ring],
        "has_names": len(off_ring) <= MAX_NAMED,
    }


def _place(ring: Sequence[ClusterRow], off_ring: Sequence[ClusterRow]) -> tuple[dict[ClusterName, Disc], float]:
    """Return the discs of the clusters on the ellipse and in rows below it, and the height of the map."""
    largest = max(1, *(row.nodes.total for row in (*ring, *off_ring)))

    def radius(row: ClusterRow, limit: float) -> float:
        return max(min(SMALLEST_RADIUS, limit / 2), limit * sqrt(row.nodes.total / largest))

    discs, number, height = {}, len(ring), 0.0
    if number:
        height = float(FLAT_RING_HEIGHT if number <= FLAT_RING else RING_HEIGHT)
        horizontal, vertical = (0.0, 0.0) if number == 1 else (WIDTH / 2 - 80, height / 2 - 70)
        # Side by side at the left and right there is room for a disc with its name below.
        limit = min(LARGEST_RADIUS, (height if number == 1 else vertical * sin(2 * pi / max(4, number)) - 24) / 2)
        for index, row in enumerate(ring):
            # The first cluster is at the left, so that two or three clusters share the width.
            angle = pi + 2 * pi * index / number
            x, y = WIDTH / 2 + horizontal * cos(angle), height / 2 - 8 + vertical * sin(angle)
            discs[row.cluster] = x, y, radius(row, limit)
    for is_stale in (False, True):
        band = [row for row in off_ring if row.stale is is_stale]
        columns = max(STALE_COLUMNS if is_stale else MIN_COLUMNS, ceil(sqrt(len(band) * 0.9)))
        cell = WIDTH / columns
        row_height = cell * 0.8 + (2 if is_stale or len(off_ring) > MAX_NAMED else 16)
        for index, row in enumerate(band):
            x, y = (index % columns + 0.5) * cell, height + (index // columns) * row_height + cell * 0.4
            discs[row.cluster] = x, y, radius(row, cell * 0.34)
        height += ceil(len(band) / columns) * row_height
    return discs, height


def _common_domain(names: Sequence[ClusterName]) -> str:
    """Return the end of all names from their first dot, which labels leave out; empty if it differs."""
    domains = {name[name.find(".") :] if name.find(".") > 0 else "" for name in names}
    return domains.pop() if len(domains) == 1 else ""


def worse_direction(record: LinkRecord) -> Link:
    """Return the higher latency and the lower bandwidth of both directions of a link."""
    both = (record.link, record.measurements.link_back)
    latencies = [link.latency for link in both if link.latency is not None]
    return Link(max(latencies, default=None), min((link.bandwidth for link in both if link.bandwidth), default=None))


def _place_links(
    records: Sequence[LinkRecord], discs: Mapping[ClusterName, Disc]
) -> Iterator[tuple[LinkRecord, Link, Disc, Disc, float]]:
    """Yield each link with its values, ends and width on a logarithmic scale, the fastest ones first."""
    links = [(record, worse_direction(record)) for record in records]
    bandwidths = [link.bandwidth for _, link in links if link.bandwidth]
    highest, lowest = max(bandwidths, default=1.0), min(bandwidths, default=1.0)
    span = max(log(highest / lowest), log(MIN_BANDWIDTH_RATIO))
    for record, link in sorted(links, key=lambda link: (-(link[1].bandwidth or 0.0), link[0].pair)):
        share = 0.0 if not link.bandwidth else 1 - log(highest / link.bandwidth) / span
        width = NARROWEST_LINK + share * (WIDEST_LINK - NARROWEST_LINK)
        yield record, link, discs[record.pair[0]], discs[record.pair[1]], width


def _curve_jobs(jobs: Sequence[MapJob], discs: Mapping[ClusterName, Disc]) -> Iterator[tuple[MapJob, str]]:
    """Yield each job with curves from its largest component to the others. Jobs of one pair of clusters are apart."""
    drawn: Counter[ClusterPair] = Counter()
    for job in jobs:
        first, *peers = job.nodes
        curves = []
        for peer in peers:
            pair = pair_of(first, peer)
            drawn[pair] += 1
            (x1, y1, _), (x2, y2, _) = (discs[name] for name in pair)
            # Alternately to both sides of the link, farther out with each job.
            step = 26.0 * ((drawn[pair] + 1) // 2) * (1 if drawn[pair] % 2 else -1)
            length = hypot(x2 - x1, y2 - y1) or 1.0
            x, y = (x1 + x2) / 2 - (y2 - y1) / length * step, (y1 + y2) / 2 + (x2 - x1) / length * step
            curves.append(f"M{x1:.1f} {y1:.1f}Q{x:.1f} {y:.1f} {x2:.1f} {y2:.1f}")
        yield job, " ".join(curves)
