"""One cluster as pages tell of it: its nodes by what they do, how old that is, and how its agent and its resource
manager are."""

from collections.abc import Sequence
from dataclasses import dataclass

from koalapy.dashboard.job_row import MAX_REASON_LENGTH
from koalapy.dashboard.pictures.node_grid import NodeCounts
from koalapy.dashboard.survey import Survey
from koalapy.model.cluster import ClusterState
from koalapy.model.reports import LrmCalls, LrmOperation
from koalapy.model.wording import shortened
from koalapy.ports import ClusterRecord
from koalapy.scheduler.clusters import ClusterStatus


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
    """A cluster's nodes, each counted once."""
    running = min(survey.running[cluster.name], cluster.used)
    return NodeCounts(
        running=running,
        claimed=cluster.used - running,
        local=cluster.background,
        down=cluster.down,
        idle=max(0, cluster.total - cluster.used - cluster.background - cluster.down),
    )


def calls_of(told: LrmCalls, reported_at: float | None) -> Calls:
    """As its agent told at that time."""
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
        reason=shortened(record.reason, MAX_REASON_LENGTH),
        nodes=node_counts(cluster, survey),
        total=cluster.total,
        known_at=known_at,
        stale=known_at is None or known_at < now,
        connected=cluster.has_agent,
        heard_at=None if cluster.has_agent else cluster.contact.last_heard,
        away_because=cluster.absence,
        problem=shortened(cluster.problem, MAX_REASON_LENGTH),
        answers=calls_of(looks[0], cluster.reported_at) if looks else None,
        waiting=survey.may_run_on(cluster.name),
        drained=cluster.drained is not None,
        given_up=cluster.health.unusable,
    )


def problems_first(lanes: Sequence[Lane]) -> list[Lane]:
    """What is not well before what is, then by name."""
    well = (ClusterState.USABLE, ClusterState.DRAINED)
    return sorted(lanes, key=lambda lane: (lane.state in well, lane.state == ClusterState.USABLE, lane.cluster))
