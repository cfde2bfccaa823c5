"""Alerts as pages tell of them: with where to look, and with the action that helps where it is one of a cluster's."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from koalapy.dashboard.rendering import with_query
from koalapy.model.alert import Alert, AlertKind
from koalapy.model.job_search import word_of
from koalapy.scheduler.grid import GridStatus

ClusterAction = Literal["", "drain", "clear"]
_WHERE = {
    AlertKind.DATABASE: ("/scheduler", "the scheduler"),
    AlertKind.DISK: ("/clusters", "the clusters"),
    AlertKind.SLOW_LINK: ("/network", "the network"),
    AlertKind.REPLICAS_GONE: ("/files", "the files"),
}
"""The page that says more, and its name, of kinds that are about no cluster, job or user."""

_HELPED_BY_DRAINING = (AlertKind.RESOURCE_MANAGER, AlertKind.BLACK_HOLE, AlertKind.CLUSTER_FLAPPING)


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong now."""

    alert: Alert
    where: str
    """The page that says more; empty where none does."""
    name: str
    """What that page is about."""
    action: ClusterAction
    """What an operator may do to its cluster that helps."""


def trouble_of(alert: Alert, grid: GridStatus) -> Trouble:
    """With where to look, and what may be done."""
    where, name = _where(alert)
    return Trouble(alert, where, name, _action(alert, grid))


def _where(alert: Alert) -> tuple[str, str]:
    if alert.kind in (AlertKind.SLOW_LINK, AlertKind.REPLICAS_GONE):
        return _WHERE[alert.kind]
    if alert.kind is AlertKind.QUEUE_FLOODED:
        return with_query(
            "/queue", q=f"{word_of('user', alert.user)} state:waiting"
        ), f"what {alert.user} has in the queue"
    if alert.job is not None:
        return f"/jobs/{alert.job}", f"job {alert.job}"
    if alert.cluster:
        return f"/clusters/{quote(alert.cluster, safe='')}", f"cluster {alert.cluster}"
    return _WHERE.get(alert.kind, ("", ""))


def _action(alert: Alert, grid: GridStatus) -> ClusterAction:
    if alert.cluster not in grid or alert.kind not in _HELPED_BY_DRAINING:
        return ""
    cluster = grid[alert.cluster]
    if cluster.health.unusable and alert.kind is AlertKind.BLACK_HOLE:
        return "clear"
    return "" if cluster.drained is not None else "drain"
