"""Group active alerts by their cause, for the overview."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from koalapy.dashboard.rows import AlertRow
from koalapy.model.alert import Alert, AlertKind, MarkAction, Severity

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

    kind: AlertKind
    severity: Severity
    summary: str
    cause: str
    remedy: str
    """The remedy for one of them, with ``NAME`` in place of its cluster if there are several."""
    since: float
    """The earliest start."""
    alerts: Sequence[AlertRow]
    is_acknowledged: bool

    @property
    def targets(self) -> Sequence[str]:
        return [row.alert.target for row in self.alerts]


def group_alerts(rows: Sequence[AlertRow]) -> tuple[list[AlertGroup], list[AlertRow]]:
    """Return the groups of alerts, those that are not acknowledged first, and the silenced alerts."""
    by_cause: dict[tuple[object, ...], list[AlertRow]] = {}
    silenced = []
    for row in rows:
        alert = row.alert
        if alert.is_silenced:
            silenced.append(row)
            continue
        key = alert.kind, alert.severity, _without_cluster(alert.cause, alert), _is_acknowledged(alert)
        by_cause.setdefault(key, []).append(row)
    groups = [_make_group(group) for group in by_cause.values()]
    return sorted(groups, key=lambda group: group.is_acknowledged), silenced


def _is_acknowledged(alert: Alert) -> bool:
    return alert.mark is not None and alert.mark.action is MarkAction.ACKNOWLEDGE


def _make_group(rows: Sequence[AlertRow]) -> AlertGroup:
    first, count = rows[0].alert, len(rows)
    cause, remedy, summary = first.cause, first.remedy, first.summary
    if count > 1:
        cause, remedy = _without_cluster(cause, first), _without_cluster(remedy, first)
        summary = MANY.get(first.kind, "{} alerts: " + first.kind).format(count)
    since = min(row.alert.since for row in rows)
    return AlertGroup(first.kind, first.severity, summary, cause, remedy, since, rows, _is_acknowledged(first))


def _without_cluster(text: str, alert: Alert) -> str:
    """Return a text with ``NAME`` in place of the alert's cluster."""
    return re.sub(rf"(?<![\w.-]){re.escape(alert.cluster)}(?![\w-])", "NAME", text) if alert.cluster else text
