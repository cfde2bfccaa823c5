"""Group active alerts by their cause, for the overview."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from koalapy.dashboard.cluster_table import cluster_path
from koalapy.dashboard.rendering import with_query
from koalapy.model.alert import Alert, AlertKind
from koalapy.model.job_search import format_term
from koalapy.scheduler.grid import GridStatus

MANY = {
    AlertKind.AGENT_AWAY: "{} clusters are unreachable: their agents are not connected",
    AlertKind.RESOURCE_MANAGER: "the resource managers of {} clusters do not answer or accept no jobs",
    AlertKind.BLACK_HOLE: "jobs fail on {} clusters",
    AlertKind.CLUSTER_FLAPPING: "{} clusters are unstable",
    AlertKind.AGENT_FLOODS: "the agents of {} clusters send too much",
    AlertKind.OLD_VERSION: "the agents of {} clusters have another version than the daemon",
    AlertKind.CLAIM_STUCK: "{} jobs wait for nodes that they hold in part",
    AlertKind.JOB_STARVES: "{} jobs wait while later jobs start",
    AlertKind.QUEUE_FLOODED: "{} users have most of the queued jobs",
    AlertKind.DISK: "{} disks are nearly full or full",
    AlertKind.SLOW_LINK: "{} links are slow or down",
    AlertKind.REPLICAS_GONE: "files are missing on {} clusters",
    AlertKind.RECORDS_LOST: "the agents of {} clusters have lost records",
    AlertKind.CERTIFICATE: "{} certificates need attention",
}
"""Summaries of several alerts of a kind."""


_PAGES = {
    AlertKind.DATABASE: ("/scheduler", "the scheduler"),
    AlertKind.DISK: ("/clusters", "the clusters"),
    AlertKind.SLOW_LINK: ("/network", "the network"),
    AlertKind.RELAY: ("/network", "the network"),
    AlertKind.REPLICAS_GONE: ("/files", "the files"),
}
"""Path and name of the page with details, for alerts that do not concern a cluster, job or user."""

_HELPED_BY_DRAINING = (AlertKind.RESOURCE_MANAGER, AlertKind.BLACK_HOLE, AlertKind.CLUSTER_FLAPPING)
"""Kinds of alerts after which a drain keeps jobs from a cluster."""


@dataclass(frozen=True, slots=True)
class AlertGroup:
    """Alerts with the same cause, most urgent first."""

    alert: Alert
    """The first alert; of several, with the earliest start of all, a summary, and ``NAME`` in place of the cluster in
    texts."""
    alerts: Sequence[tuple[Alert, str]]
    """All of them, each with the path of the page with its details; empty if there is none."""
    page: str
    """Path of the page with details of the group: of several clusters, the list of those without an agent."""
    name: str
    """Subject of that page."""
    action: Literal["", "drain", "clear"] = ""
    """The action on its cluster that resolves a single alert."""


def group_alerts(alerts: Iterable[Alert], grid: GridStatus) -> tuple[list[AlertGroup], list[Alert]]:
    """Return the groups of alerts, those that are not acknowledged first, and the silenced alerts. The marks of other
    alerts are acknowledgements."""
    by_cause: dict[tuple[object, ...], list[Alert]] = {}
    silenced = []
    for alert in alerts:
        if alert.is_silenced:
            silenced.append(alert)
            continue
        key = alert.kind, alert.severity, _without_cluster(alert.cause, alert), alert.mark is None
        by_cause.setdefault(key, []).append(alert)
    groups = [_make_group(group, grid) for group in by_cause.values()]
    return sorted(groups, key=lambda group: group.alert.mark is not None), silenced


def _make_group(alerts: Sequence[Alert], grid: GridStatus) -> AlertGroup:
    first, pages = alerts[0], [_details_page(alert) for alert in alerts]
    with_pages = [(alert, path) for alert, (path, _) in zip(alerts, pages, strict=True)]
    if len(alerts) == 1:
        return AlertGroup(first, with_pages, *pages[0], _helpful_action(first, grid))
    since = min(alert.since for alert in alerts)
    cause, remedy = _without_cluster(first.cause, first), _without_cluster(first.remedy, first)
    summary = MANY.get(first.kind, "{} alerts: " + first.kind).format(len(alerts))
    common = replace(first, summary=summary, cause=cause, remedy=remedy, since=since)
    page = "/clusters?q=unreachable" if first.kind is AlertKind.AGENT_AWAY else ""
    return AlertGroup(common, with_pages, page, "all unreachable clusters")


def _helpful_action(alert: Alert, grid: GridStatus) -> Literal["", "drain", "clear"]:
    """Return the action on the cluster of an alert that resolves it."""
    if alert.cluster not in grid or alert.kind not in _HELPED_BY_DRAINING:
        return ""
    cluster = grid[alert.cluster]
    if cluster.health.unusable and alert.kind is AlertKind.BLACK_HOLE:
        return "clear"
    return "drain" if cluster.drained is None else ""


def _details_page(alert: Alert) -> tuple[str, str]:
    """Return the path and the name of the page about an alert's subject; empty if there is none."""
    if alert.kind in (AlertKind.SLOW_LINK, AlertKind.REPLICAS_GONE):
        return _PAGES[alert.kind]
    if alert.kind is AlertKind.QUEUE_FLOODED:
        path = with_query("/queue", q=f"{format_term('user', alert.user)} state:waiting")
        return path, f"jobs of {alert.user} in the queue"
    if alert.job is not None:
        return f"/jobs/{alert.job}", f"job {alert.job}"
    if alert.cluster:
        return cluster_path(alert.cluster), f"cluster {alert.cluster}"
    return _PAGES.get(alert.kind, ("", ""))


def _without_cluster(text: str, alert: Alert) -> str:
    """Return a text with ``NAME`` in place of the alert's cluster."""
    return re.sub(rf"(?<![\w.-]){re.escape(alert.cluster)}(?![\w-])", "NAME", text) if alert.cluster else text
