"""Group active alerts by their cause, for the overview."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from koalapy.dashboard.rows import AlertRow
from koalapy.model.alert import Alert, AlertKind

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


@dataclass(frozen=True, slots=True)
class AlertGroup:
    """Alerts with the same cause, most urgent first."""

    alert: Alert
    """What they have in common: the first with the earliest start and, of several, a summary of all. Texts have
    ``NAME`` in place of the cluster then."""
    alerts: Sequence[AlertRow]

    @property
    def page(self) -> str:
        """Return the path of the page with details: of several clusters, the list of those without an agent."""
        if len(self.alerts) == 1:
            return self.alerts[0].page
        return "/clusters?q=unreachable" if self.alert.kind is AlertKind.AGENT_AWAY else ""

    @property
    def name(self) -> str:
        return self.alerts[0].name if len(self.alerts) == 1 else "all unreachable clusters"


def group_alerts(rows: Sequence[AlertRow]) -> tuple[list[AlertGroup], list[AlertRow]]:
    """Return the groups of alerts, those that are not acknowledged first, and the silenced alerts. The marks of other
    alerts are acknowledgements."""
    by_cause: dict[tuple[object, ...], list[AlertRow]] = {}
    silenced = []
    for row in rows:
        alert = row.alert
        if alert.is_silenced:
            silenced.append(row)
            continue
        key = alert.kind, alert.severity, _without_cluster(alert.cause, alert), alert.mark is None
        by_cause.setdefault(key, []).append(row)
    groups = [_make_group(group) for group in by_cause.values()]
    return sorted(groups, key=lambda group: group.alert.mark is not None), silenced


def _make_group(rows: Sequence[AlertRow]) -> AlertGroup:
    first, count = rows[0].alert, len(rows)
    if count == 1:
        return AlertGroup(first, rows)
    since = min(row.alert.since for row in rows)
    cause, remedy = _without_cluster(first.cause, first), _without_cluster(first.remedy, first)
    summary = MANY.get(first.kind, "{} alerts: " + first.kind).format(count)
    return AlertGroup(replace(first, summary=summary, cause=cause, remedy=remedy, since=since), rows)


def _without_cluster(text: str, alert: Alert) -> str:
    """Return a text with ``NAME`` in place of the alert's cluster."""
    return re.sub(rf"(?<![\w.-]){re.escape(alert.cluster)}(?![\w-])", "NAME", text) if alert.cluster else text
