"""Why? The binding reason of a job that waits, what would suffice, and the smallest change that would place it now."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from koalapy.model.cluster import ClusterState
from koalapy.model.explanation import ClusterFinding, Explanation, PastReason
from koalapy.model.job import Job, JobId, JobSpec, JobState, TimelineEntry
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_time
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.explain.cluster_findings import (
    Kept,
    Lack,
    cluster_findings,
    enough_idle,
    lacking_by,
    listed_where,
)
from koalapy.scheduler.explain.current_state import current_state
from koalapy.scheduler.explain.dry_run import DryRun, Way
from koalapy.scheduler.explain.smallest_change import smallest_change
from koalapy.scheduler.queries import Queries

MAX_HISTORY_LENGTH = 50
MAX_CLOSED_CLUSTERS = 10
"""Of so many clusters that are not usable it is worked out whether their return would do."""


def explain(
    queries: Queries, job: Job, timeline: Sequence[TimelineEntry], now: float, *, high_priority_allowed: bool = True
) -> Explanation:
    """Explain why a job is where it is. ``high_priority_allowed``: whether the caller may be offered high priority."""
    known = queries.job(job.id) is not None
    if job.state is JobState.QUEUED and known:
        dry_run = DryRun(queries, job, high_priority_allowed=high_priority_allowed)
        explanation = _queued_job(dry_run, job, timeline, now)
    else:
        explanation = current_state(job, timeline, queries.grid, queries.lrm_waits, queries.rules, now)
        if job.state is JobState.HELD:
            answer = DryRun(queries, job).answer(job.spec)
            if isinstance(answer, Placement):
                note = f"there is room for it on {listed_where(answer)}"
            else:
                note = f"released now it would wait: {answer.summary}"
            explanation = replace(explanation, notes=(note,), suffices=(f"its release (koala release {job.id})",))
    tries = queries.tries(job.id) if known else job.placement_tries
    return replace(explanation, tries=tries, reasons=_history(timeline))


def explain_submission(
    queries: Queries, spec: JobSpec, now: float, *, high_priority_allowed: bool = True
) -> Explanation:
    """Where a job would go if it were submitted now, and why not elsewhere; or why it would wait."""
    dry_run = DryRun(queries, high_priority_allowed=high_priority_allowed)
    answer = dry_run.answer(spec)
    tried, excess = dry_run.is_tried_at_once(spec), queries.over_limit(spec)
    if isinstance(answer, Placement) and tried and excess is None:
        clusters, notes = _clusters(dry_run, spec, answer, (), {}, now)
        others = f", where {dry_run.who_makes_room(spec)}" if dry_run.preempts(spec, answer) else ""
        headline = f"would be placed at once on {listed_where(answer)}{others}"
        return Explanation(None, JobState.PLACED, headline, clusters, notes, placement=answer)
    if excess is not None:
        headline = excess.waiting_reason
    elif not tried:
        headline = f"would wait behind job {queries.queues.head_before(spec)}"
    elif _is_reservation_in_the_way(dry_run, spec):
        headline = f"nodes are kept for job {dry_run.keeper}, which has waited longer"
    else:
        headline = answer.summary if isinstance(answer, Refusal) else ""
    ahead = queries.queues.before_new(spec)
    return replace(_waiting(dry_run, spec, answer, headline, now), position=ahead + 1, ahead=ahead)


# A job that waits


def _queued_job(dry_run: DryRun, job: Job, timeline: Sequence[TimelineEntry], now: float) -> Explanation:
    queries = dry_run.queries
    explanation = _waiting(dry_run, job.spec, dry_run.answer(job.spec), queries.waiting_reason(job), now)
    returns = [e for e in timeline if e.event in ("requeued", "released")]
    notes = explanation.notes
    if returns and returns[-1].event == "requeued":
        notes = (f"queued again at {format_time(returns[-1].at, now, exact=True)}: {returns[-1].reason}", *notes)
    position = queries.position(job.id)
    return replace(explanation, notes=notes, position=position, ahead=(position or 1) - 1)


def _waiting(dry_run: DryRun, spec: JobSpec, answer: Placement | Refusal, headline: str, now: float) -> Explanation:
    """What is common to a job that waits and to a submission that would."""
    queries, job = dry_run.queries, dry_run.job
    placement = answer if isinstance(answer, Placement) else None
    ways = tuple(dry_run.ways(spec)) if placement is None else ()
    refused = [dry_run.reasons(spec, way.view) for way in ways]
    lacking = _lacking(ways, refused, queries.grid.clusters())
    clusters, notes = _clusters(dry_run, spec, placement, refused[0] if refused else (), lacking, now)
    if placement is not None:
        notes = (f"there is room for it on {listed_where(placement)}", *notes)
        if job is not None and not queries.rules.event_driven:
            notes = (*notes, f"scans come every {queries.rules.scan_interval:g} s: event_driven is off")
    elif isinstance(answer, Refusal) and answer.summary != headline:
        notes = (answer.summary, *notes)
    suffices = []
    if placement is None and queries.over_limit(spec) is None:
        suffices = [*enough_idle(lacking), *_enough_if_usable(dry_run, spec, ways)]
    if _is_reservation_in_the_way(dry_run, spec):
        # Once it is placed, it has them: that alone is no help.
        reserved = dry_run.keeper
        suffices.append(f"job {reserved}, for which nodes are kept, out of its way (koala hold {reserved})")
    elif (first := _must_be_placed_first(dry_run, spec)) is not None:
        suffices.append(f"job {first} placed before it")
    instead = dry_run.instead() if queries.over_limit(spec) is None else None
    return Explanation(
        job.id if job is not None else None,
        job.state if job is not None else JobState.QUEUED,
        headline,
        clusters,
        notes,
        tuple(suffices),
        smallest_change=smallest_change(spec, instead) if instead is not None else None,
        placement=placement,
    )


def _clusters(
    dry_run: DryRun,
    spec: JobSpec,
    placement: Placement | None,
    refused: Sequence[ClusterReason],
    lacking: Mapping[ClusterName, Lack],
    now: float,
) -> tuple[tuple[ClusterFinding, ...], tuple[str, ...]]:
    """Cluster by cluster, and the reasons that are of none of them."""
    view = dry_run.view(spec.priority)
    clusters = dry_run.queries.grid.clusters()
    kept = Kept(dry_run.keeper, {c.name: dry_run.kept(c.name, spec.priority) for c in clusters})
    findings = cluster_findings(spec.request, clusters, view, placement, refused, kept, lacking, now)
    names = {cluster.name for cluster in clusters}
    return tuple(findings), tuple(reason.reason for reason in refused if reason.cluster not in names)


def _lacking(
    ways: Sequence[Way], refused: Sequence[Sequence[ClusterReason]], clusters: Sequence[ClusterStatus]
) -> dict[ClusterName, Lack]:
    """What more idle nodes on each cluster would suffice: the fewest, in whichever way the rest is had."""
    lacking: dict[ClusterName, Lack] = {}
    for way, reasons in zip(ways, refused, strict=True):
        for name, lack in lacking_by(way, reasons, clusters):
            lacking[name] = min(lack, lacking.get(name, lack))
    return lacking


def _is_reservation_in_the_way(dry_run: DryRun, spec: JobSpec) -> bool:
    """Whether only the nodes kept for another job keep it from being placed."""
    queries = dry_run.queries
    if not any(dry_run.kept(cluster.name, spec.priority) for cluster in queries.grid.clusters()):
        return False
    return isinstance(dry_run.ask(spec, queries.grid.view()), Placement)


def _must_be_placed_first(dry_run: DryRun, spec: JobSpec) -> JobId | None:
    """The one job that has to be placed first."""
    job, mode = dry_run.job, dry_run.queries.rules.queue
    if mode == "scan" or (job is None and mode == "head"):
        return None
    if job is None:
        return dry_run.queries.queues.head_before(spec)
    head = dry_run.queries.queues.head(spec)
    return head if head != job.id else None


def _enough_if_usable(dry_run: DryRun, spec: JobSpec, ways: Sequence[Way]) -> list[str]:
    """The clusters whose return, each alone, would do."""
    closed = [cluster for cluster in dry_run.queries.grid.clusters() if not cluster.is_open or cluster.doubted]
    texts = []
    for cluster in closed[:MAX_CLOSED_CLUSTERS]:
        if any(_is_enough_if_usable(dry_run, spec, way, cluster) for way in ways):
            if cluster.state is ClusterState.DRAINED:
                texts.append(f"{cluster.name} resumed (koala clusters resume {cluster.name})")
            elif cluster.state is ClusterState.UNUSABLE:
                texts.append(f"{cluster.name} mended (koala clusters clear {cluster.name})")
            elif cluster.state is ClusterState.UNREACHABLE:
                texts.append(f"{cluster.name} in reach again")
            elif cluster.doubted:
                texts.append(f"{cluster.name} giving nodes that it says are idle, which is tried again")
            else:
                texts.append(f"the component that is tried on {cluster.name} started")
    return texts


def _is_enough_if_usable(dry_run: DryRun, spec: JobSpec, way: Way, cluster: ClusterStatus) -> bool:
    idle = max(0, way.offered(cluster, cluster.doubted))
    opened = tuple(
        replace(c.with_idle(idle), state=ClusterState.USABLE) if c.name == cluster.name else c
        for c in way.view.clusters
    )
    return isinstance(dry_run.ask(spec, replace(way.view, clusters=opened)), Placement)


def _history(timeline: Sequence[TimelineEntry]) -> tuple[PastReason, ...]:
    """The lines of the timeline that say why; of those that say the same one after the other the last."""
    past: list[PastReason] = []
    for entry in timeline:
        if past and past[-1].reason == entry.reason:
            past.pop()
        if entry.reason:
            past.append(PastReason(entry.at, entry.event, entry.reason))
    return tuple(past[-MAX_HISTORY_LENGTH:])
