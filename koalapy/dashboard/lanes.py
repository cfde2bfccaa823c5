"""One cluster, and what is wrong, as pages tell of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from koalapy.dashboard.job_row import MAX_REASON_LENGTH
from koalapy.dashboard.pictures import NodeCounts
from koalapy.dashboard.rendering import with_query
from koalapy.dashboard.survey import Survey
from koalapy.model.alert import Alert, AlertKind
from koalapy.model.cluster import ClusterState
from koalapy.model.job_search import format_term
from koalapy.model.reports import LrmCalls, LrmOperation
from koalapy.model.wording import shorten
from koalapy.ports import ClusterRecord
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import GridStatus


@dataclass(frozen=True, slots=True)
class Calls:
    """How a resource manager answered its agent in one way, since the agent began; seconds."""

    operation: str
    count: int
    failures: int
    mean: float | None
    largest: float
    """Of the last minutes."""
    last_error: str
    failed_at: float | None
    """When it last failed."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One cluster."""

    cluster: str
    kind: str
    state: str
    reason: str
    """Everything that an operator should know of it; empty when all is well."""
    nodes: NodeCounts
    total: int
    known_at: float | None
    """The moment of which its nodes are known: now, as a rule."""
    stale: bool
    """Whether that is past, so that what is shown may not be so any more."""
    connected: bool
    """Whether its agent is connected."""
    heard_at: float | None
    """When its agent was last heard of, where it is not connected."""
    away_because: str
    """Why its agent is not connected."""
    problem: str
    """Why nothing can be started there, by what its agent knows of its resource manager."""
    answers: Calls | None
    """How its resource manager answers when it is looked at; None of an agent that does not tell."""
    waiting: int
    """Jobs that wait and might run there."""
    drained: bool
    given_up: bool
    """Whether it was given up after errors in a row, so that it may be cleared."""


def node_counts(cluster: ClusterStatus, survey: Survey) -> NodeCounts:
    running = min(survey.running[cluster.name], cluster.used)
    return NodeCounts(
        running=running,
        claimed=cluster.used - running,
        local=cluster.background,
        down=cluster.down,
        idle=max(0, cluster.total - cluster.used - cluster.background - cluster.down),
    )


def calls_of(told: LrmCalls, reported_at: float | None) -> Calls:
    ago = told.failed_ago
    return Calls(
        operation=told.operation,
        count=told.count,
        failures=told.failures,
        mean=told.seconds / told.count if told.count else None,
        largest=told.largest,
        last_error=told.last_error,
        failed_at=None if ago is None or reported_at is None else reported_at - ago,
    )


def lane_of(cluster: ClusterStatus, record: ClusterRecord, survey: Survey, now: float) -> Lane:
    """``record`` is of the same cluster."""
    known_at = cluster.known_at(now)
    looks = [told for told in cluster.calls if told.operation == LrmOperation.SNAPSHOT]
    return Lane(
        cluster=cluster.name,
        kind=record.kind,
        state=record.state,
        reason=shorten(record.reason, MAX_REASON_LENGTH),
        nodes=node_counts(cluster, survey),
        total=cluster.total,
        known_at=known_at,
        stale=known_at is None or known_at < now,
        connected=cluster.has_agent,
        heard_at=None if cluster.has_agent else cluster.contact.last_heard,
        away_because=cluster.absence,
        problem=shorten(cluster.problem, MAX_REASON_LENGTH),
        answers=calls_of(looks[0], cluster.reported_at) if looks else None,
        waiting=survey.may_run_on(cluster.name),
        drained=cluster.drained is not None,
        given_up=cluster.health.unusable,
    )


def problems_first(lanes: Sequence[Lane]) -> list[Lane]:
    """What is not well before what is, then by name."""
    well = (ClusterState.USABLE, ClusterState.DRAINED)
    return sorted(lanes, key=lambda lane: (lane.state in well, lane.state == ClusterState.USABLE, lane.cluster))


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
            "/queue", q=f"{format_term('user', alert.user)} state:waiting"
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
