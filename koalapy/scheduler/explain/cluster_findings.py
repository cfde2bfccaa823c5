"""What each cluster means for a job that waits: what is idle there, who has the rest, and why that is not enough."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.explanation import ClusterFinding
from koalapy.model.job import JobId
from koalapy.model.placement import ClusterReason, Placement
from koalapy.model.request import ClusterName, FixedRequest, Request
from koalapy.model.wording import format_list, format_nodes, format_time
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.explain.dry_run import Way


@dataclass(frozen=True, slots=True)
class Kept:
    """Nodes that are not offered to a job, by cluster, since they are kept for another one, if for any."""

    by: JobId | None
    nodes: Mapping[ClusterName, int]


class Lack(NamedTuple):
    """What more idle nodes on a cluster, on that one alone, would suffice."""

    nodes: int
    beside: str
    """Which are to come beside these, where others make room; else empty."""


def finding_of(
    cluster: ClusterStatus, idle: int, *, gives: int = 0, reason: str = "", missing: int | None = None
) -> ClusterFinding:
    return ClusterFinding(
        cluster.name,
        cluster.state,
        cluster.total,
        idle,
        cluster.used,
        cluster.background,
        cluster.down,
        gives,
        reason,
        missing,
    )


def cluster_findings(
    request: Request,
    clusters: Sequence[ClusterStatus],
    view: GridView,
    placement: Placement | None,
    refused: Sequence[ClusterReason],
    kept: Kept,
    lacking: Mapping[ClusterName, Lack],
    now: float,
) -> Iterator[ClusterFinding]:
    """Of every cluster that the request could have to do with; ``kept``: what is kept from it."""
    reasons = {reason.cluster: reason for reason in refused}
    named = {c.cluster for c in request.components} if isinstance(request, FixedRequest) else None
    for cluster in clusters:
        if named is not None and cluster.name not in named:
            continue
        seen = view.get(cluster.name)
        idle = seen.idle if seen is not None else 0
        gives = placement.nodes_on(cluster.name) if placement is not None else 0
        refusal = reasons.get(cluster.name)
        why = not_usable(cluster, now) or (refusal.reason if refusal is not None else "") or _part_of(placement, gives)
        if cluster.is_open and (holders := _holders(cluster, idle, kept.by)):
            why = f"{why or f'{idle} of {cluster.total} nodes idle'} ({holders})"
        missing = lacking[cluster.name].nodes if cluster.name in lacking else None
        yield finding_of(cluster, idle, gives=gives, reason=why, missing=missing)


def lacking_by(
    way: Way, refused: Sequence[ClusterReason], clusters: Iterable[ClusterStatus]
) -> Iterator[tuple[ClusterName, Lack]]:
    """Cluster by cluster what is lacking if nodes are had in that way, by what the policy says of it."""
    missing = {reason.cluster: reason.missing for reason in refused if reason.missing is not None}
    for cluster in clusters:
        seen = way.view.get(cluster.name)
        if cluster.is_open and cluster.name in missing and seen is not None:
            more = _more_idle(cluster, way, seen.idle + missing[cluster.name])
            if more is not None:
                yield cluster.name, Lack(more, way.beside if way.others(cluster) else "")


def _more_idle(cluster: ClusterStatus, way: Way, wanted: int) -> int | None:
    """Return how many more idle nodes offer so many; None where they cannot come, as they are idle, kept, in doubt or
    beyond a limit."""
    counts = range(cluster.total - cluster.idle - way.others(cluster) + 1)
    more = bisect_left(counts, wanted, key=lambda more: way.offered(cluster, more))
    return more if more < len(counts) else None


def not_usable(cluster: ClusterStatus, now: float) -> str:
    """Why nothing is placed on a cluster, with since when; empty when it may be used."""
    if cluster.state is ClusterState.USABLE:
        return ""
    if cluster.drained is not None:
        return f"drained since {format_time(cluster.drained.at, now)} {cluster.why}"
    if cluster.state is ClusterState.UNREACHABLE:
        heard = None if cluster.contact.connected else cluster.contact.last_heard
        since = "" if heard is None else f" since {format_time(heard, now)}"
        return f"unreachable{since}: {cluster.why}"
    if cluster.state is ClusterState.UNUSABLE:
        at = cluster.health.probation_at
        again = "" if at is None else f"; to be tried again at {format_time(at, now)}"
        return f"{cluster.why}{again}"
    return cluster.why


def _part_of(placement: Placement | None, gives: int) -> str:
    if placement is None:
        return ""
    return f"{format_nodes(gives)} would be taken here" if gives else "not needed"


def _holders(cluster: ClusterStatus, idle: int, kept_for: JobId | None) -> str:
    """Who has the nodes that are not idle: ``local users have 2, our jobs 1, 1 is down``."""
    texts: list[str] = []
    for who, count in (("local users", cluster.background), ("our jobs", cluster.used)):
        if count:
            texts.append(f"{who} {'' if texts else 'have '}{count}")
    if cluster.down:
        texts.append(f"{cluster.down} {'is' if cluster.down == 1 else 'are'} down")
    texts += [f"{cluster.name} {each}" for each in (cluster.limit, cluster.doubt) if each is not None]
    texts += cluster.notices
    if idle < cluster.available and kept_for is not None:
        texts.append(f"{cluster.available - idle} kept for job {kept_for}")
    return ", ".join(texts)


def enough_idle(lacking: Mapping[ClusterName, Lack]) -> list[str]:
    """What more idle nodes on one cluster would do, the fewest first."""
    ordered = sorted((lack.nodes, name, lack.beside) for name, lack in lacking.items())
    return [
        f"{format_nodes(count, 'more idle')} in {name}{beside and f' beside {beside}'}"
        for count, name, beside in ordered
    ]


def listed_where(placement: Placement) -> str:
    """``north (4 nodes), south (2 nodes)``; components on one cluster together."""
    names = dict.fromkeys(component.cluster for component in placement.components)
    return format_list([f"{name} ({format_nodes(placement.nodes_on(name))})" for name in names])
