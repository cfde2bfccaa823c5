"""Explain the state of a job: why it waits, which nodes would suffice, and the smallest change that places it."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from koalapy.model.cluster import ClusterState, ClusterView
from koalapy.model.dependency import Clause
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobId, JobState, TimelineEntry
from koalapy.model.job_spec import JobSpec
from koalapy.model.placement import (
    ClusterFinding,
    ClusterReason,
    Explanation,
    PastReason,
    PlacedComponent,
    Placement,
    Refusal,
    RefusalKind,
)
from koalapy.model.request import ClusterName, FixedRequest
from koalapy.model.wording import format_bytes, format_list, format_nodes, format_time
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.explain.dry_run import DryRun, NodeSource
from koalapy.scheduler.explain.smallest_change import smallest_change
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.queries import Queries
from koalapy.scheduler.queue.start_conditions import describe_deferral
from koalapy.scheduler.rules import Rules


class Lack(NamedTuple):
    """The additional idle nodes on one cluster that alone would suffice."""

    nodes: int
    beside: str
    """The nodes of preempted jobs that are needed in addition; empty if none."""


def finding_of(
    cluster: ClusterStatus, idle: int, *, gives: int = 0, reason: str = "", missing: int | None = None
) -> ClusterFinding:
    """Return the entry of a cluster in an explanation, with its state and node counts.

    ``gives``: nodes that the job would get there; ``missing``: additional idle nodes that would suffice, if known.
    """
    return ClusterFinding(
        cluster.name,
        cluster.state,
        cluster.last_report.total,
        idle,
        cluster.nodes.used,
        cluster.last_report.background,
        cluster.last_report.down,
        gives,
        reason,
        missing,
    )


def _more_idle(cluster: ClusterStatus, source: NodeSource, required: int) -> int | None:
    """Return how many more idle nodes offer ``required`` nodes; None if that many cannot become idle."""
    counts = range(cluster.last_report.total - cluster.nodes.idle - source.others(cluster) + 1)
    count = bisect_left(counts, required, key=lambda count: source.offered(cluster, count))
    return count if count < len(counts) else None


def not_usable(cluster: ClusterStatus, now: float) -> str:
    """Return why nothing is placed on a cluster, and since when; empty if it may be used."""
    if cluster.state is ClusterState.USABLE:
        return ""
    if cluster.drained is not None:
        return f"drained since {format_time(cluster.drained.since, now)} {cluster.state_reason}"
    if cluster.state is ClusterState.UNREACHABLE:
        heard = None if cluster.contact.connected else cluster.contact.last_heard
        since = "" if heard is None else f" since {format_time(heard, now)}"
        return f"unreachable{since}: {cluster.state_reason}"
    if cluster.state is ClusterState.UNUSABLE:
        probation_at = cluster.health.probation_at
        again = "" if probation_at is None else f"; to be tried again at {format_time(probation_at, now)}"
        return f"{cluster.state_reason}{again}"
    return cluster.state_reason


def _holders(cluster: ClusterStatus, idle: int, kept_for: JobId | None) -> str:
    """Return what uses the nodes that are not idle: ``local users have 2, our jobs 1, 1 is down``."""
    texts: list[str] = []
    now = cluster.reported_at or 0.0
    reserved = sum(entry.nodes for entry in cluster.last_report.reservations if entry.begins <= now < entry.ends)
    for who, count in (
        ("local users", max(0, cluster.last_report.background - reserved)),
        ("our jobs", cluster.nodes.used),
    ):
        if count:
            texts.append(f"{who} {'' if texts else 'have '}{count}")
    if cluster.last_report.down:
        texts.append(f"{cluster.last_report.down} {'is' if cluster.last_report.down == 1 else 'are'} down")
    if count := sum(part.idle for part in cluster.nodes.parts):
        texts.append(f"{count} partly used {'node' if count == 1 else 'nodes'} can be shared")
    texts += [
        f"{cluster.name} {condition}"
        for condition in (cluster.health.limit, cluster.health.doubt)
        if condition is not None
    ]
    texts += (*cluster.reservation_texts, *cluster.last_report.notices)
    if idle < cluster.nodes.available and kept_for is not None:
        texts.append(f"{cluster.nodes.available - idle} kept for job {kept_for}")
    return ", ".join(texts)


def enough_idle(lacking: Mapping[ClusterName, Lack]) -> list[str]:
    """Return which additional idle nodes on one cluster would suffice, the fewest first."""
    ordered = sorted((lack.nodes, name, lack.beside) for name, lack in lacking.items())
    return [
        f"{format_nodes(count, 'more idle')} in {name}{beside and f' beside {beside}'}"
        for count, name, beside in ordered
    ]


def listed_where(placement: Placement) -> str:
    """Return a placement as text: ``north (4 nodes), south (2 nodes)``."""
    names = dict.fromkeys(component.cluster for component in placement.components)
    return format_list([f"{name} ({format_nodes(placement.nodes_on(name))})" for name in names])


def current_state(job: Job, timeline: Sequence[TimelineEntry], queries: Queries, now: float) -> Explanation:
    """Explain an active, held or finished job; its history is added by the caller."""
    attempt, headline = job.attempt, _make_headline(job, queries, now)
    if attempt is None or job.state is JobState.HELD:
        return Explanation(job.id, job.state, headline)
    return Explanation(
        job.id,
        job.state,
        headline,
        clusters=tuple(_findings(attempt, queries.grid, now)) if job.state.is_active else (),
        placement=_placement(attempt, timeline),
    )


def _placement(attempt: Attempt, timeline: Sequence[TimelineEntry]) -> Placement:
    """Return where the attempt was placed, and the reason of the policy."""
    reasons = [e.reason for e in timeline if e.event == "placed" and e.generation == attempt.generation]
    components = tuple(
        PlacedComponent(c.size, c.cluster, c.request_index, node_class=c.node_class) for c in attempt.gang
    )
    return Placement(components, reasons[-1] if reasons else "")


def _make_headline(job: Job, queries: Queries, now: float) -> str:
    """Return the summary of a job's present state that heads its explanation."""
    attempt, waits, grid = job.attempt, queries.lrm_waits, queries.grid
    if job.state is JobState.HELD:
        return "held" if job.reason in ("", "held") else f"held: {job.reason}"
    if job.state.is_final:
        ended = "" if job.ended_at is None else f" at {format_time(job.ended_at, now)}"
        return f"{job.state}{ended}" + (f": {job.reason}" if job.reason not in ("", job.state) else "")
    if job.tasks is not None:
        return f"all tasks were started: {job.tasks}" + (f"; {job.reason}" if job.reason else "")
    if attempt is None:
        return job.reason or str(job.state)
    if job.ending is not None:
        following = "is queued again" if job.ending is JobState.QUEUED else f"has {job.ending}"
        following = "is cancelled" if job.ending is JobState.CANCELLED else following
        return f"ends its attempt, and then {following}: {attempt.end_reason}"
    if job.state is JobState.UNKNOWN:
        return _out_of_reach(attempt, now)
    if job.state is JobState.RUNNING:
        started = attempt.launched_at or job.started_at or attempt.placed_at
        headline = f"runs since {format_time(started, now)} on {_component_list(attempt.gang)}"
        return "; ".join(filter(None, (headline, waits.describe(job))))
    if job.state is JobState.STARTING:
        return "every node has reported, and the program is being launched"
    starting = [c for c in attempt.gang if (waits.up_by(job.token(c.index)) or now) > now]
    if starting:
        boot_end = max(waits.up_by(job.token(c.index)) or now for c in starting)
        headline = f"the nodes of {_components(starting)} on {_names(starting)} are being started, "
        headline += f"which takes until {format_time(boot_end, now, exact=True)} at most"
    else:
        headline = _claiming(attempt, queries.rules, now)
    lrm_reasons = f"; {reasons}" if (reasons := waits.describe(job)) else ""
    awaited = sorted({c.cluster for c in attempt.gang if c.state is not ComponentState.CLAIMED})
    problems = [
        f"; {name}: {grid[name].last_report.problem}"
        for name in awaited
        if name in grid and grid[name].last_report.problem
    ]
    return headline + lrm_reasons + "".join(problems)


def _component_list(components: Sequence[Component]) -> str:
    return format_list([f"{c.cluster} ({format_nodes(c.size)})" for c in components])


def _out_of_reach(attempt: Attempt, now: float) -> str:
    """Return the headline of a job of unknown state: which clusters are out of reach, and since when."""
    lost = [c for c in attempt.gang if c.unknown_since is not None and not c.has_ended]
    if not lost:
        return "a cluster is out of reach"
    since = min(c.unknown_since for c in lost if c.unknown_since is not None)
    names = sorted({c.cluster for c in lost})
    are = "is" if len(names) == 1 else "are"
    return f"{format_list(names)} {are} out of reach since {format_time(since, now)}: what runs there is not known"


def _claiming(attempt: Attempt, rules: Rules, now: float) -> str:
    """Return what keeps the program from starting: the components that are farthest from their nodes and files."""
    by_state: dict[ComponentState, list[Component]] = {}
    for component in attempt.gang:
        by_state.setdefault(component.state, []).append(component)
    if placed := by_state.get(ComponentState.PLACED):
        claim_at = attempt.claim_at if attempt.claim_at is not None else now
        nodes_text = "its nodes" if len(placed) == len(attempt.gang) else f"the nodes of {_components(placed)}"
        awaited = f"; {_files(attempt, now)}" if _awaited(attempt) else ""
        claim_time = format_time(claim_at, now, exact=True)
        return f"placed on {_component_list(attempt.gang)}{awaited}; asks for {nodes_text} at {claim_time}"
    if waiting := by_state.get(ComponentState.WAITING):
        return (
            f"waits in the resource manager of {_names(waiting)} behind local users with {_components(waiting)}, "
            f"for {rules.claim_grace:g} s at most"
        )
    if submitted := by_state.get(ComponentState.SUBMITTED):
        return f"waits for the nodes of {_components(submitted)} on {_names(submitted)} to report"
    if _awaited(attempt):
        return f"has all its nodes; {_files(attempt, now)}"
    return f"waits at the barrier until all of {_components(attempt.gang)} are there"


def _awaited(attempt: Attempt) -> list[Component]:
    """Return the components to which files are being transferred."""
    return [component for component in attempt.gang if component.awaits_files]


def _files(attempt: Attempt, now: float) -> str:
    """Return the progress of the transfers, and their expected end."""
    awaited = _awaited(attempt)
    size, staged = sum(c.stage_size for c in awaited), sum(c.staged for c in awaited)
    far = f" ({format_bytes(staged)} of {format_bytes(size)} are there)" if size else ""
    late = attempt.start_estimate is None or attempt.start_estimate <= now
    about = "" if late else f", expected at {format_time(attempt.start_estimate or now, now, exact=True)}"
    return f"the files of {_components(awaited)} are on their way{far}{about}"


def _components(components: Sequence[Component]) -> str:
    ranks = [str(component.rank) for component in components]
    return f"component{'s' if len(ranks) > 1 else ''} {format_list(ranks)}"


def _names(components: Sequence[Component]) -> str:
    return format_list(sorted({component.cluster for component in components}))


NOT_CLAIMED = (ComponentState.PLACED, ComponentState.SUBMITTED, ComponentState.WAITING)
MIN_CLAIMS, MIN_SHARE_IN_VAIN = 2.0, 0.1
"""Minimum number of claims, and minimum fraction of failed ones, for a report of failed claims."""

STATE_TEXTS = {
    ComponentState.PLACED: "its nodes are not asked for yet",
    ComponentState.SUBMITTED: "being handed to the resource manager",
    ComponentState.WAITING: "queued in the resource manager",
    ComponentState.CLAIMED: "every node has reported, waits at the barrier for the others",
    ComponentState.RUNNING: "runs",
    ComponentState.STOPPING: "is stopping",
    ComponentState.DELIVERING: "has ended, and what it has to bring is on its way",
    ComponentState.ENDED: "has ended",
}


def _findings(attempt: Attempt, grid: GridStatus, now: float) -> Iterator[ClusterFinding]:
    """Yield the clusters of a job's present components, with the states of these."""
    for name in dict.fromkeys(component.cluster for component in attempt.gang):
        members = [c for c in attempt.gang if c.cluster == name]
        texts = [f"component {c.rank}: {STATE_TEXTS[c.state]}{_format_since(c, now)}{_from(c)}" for c in members]
        if name in grid:
            texts += _shown_by_claims(grid[name], members, now)
            yield finding_of(
                grid[name],
                grid[name].nodes.available,
                gives=sum(c.size for c in members),
                reason=format_list(texts, separator="; "),
            )


def _shown_by_claims(cluster: ClusterStatus, components: Sequence[Component], now: float) -> list[str]:
    """Return the recent failures of claims on a cluster, if there are many and a component has no nodes yet."""
    claims, consecutive_failures = cluster.health.evidence.claims(now), cluster.health.evidence.failed_fraction(now)
    awaits = any(c.state in NOT_CLAIMED for c in components)
    if not awaits or claims < MIN_CLAIMS or consecutive_failures < MIN_SHARE_IN_VAIN:
        return []
    return [f"of claims there {consecutive_failures:.0%} came to nothing lately"]


def _from(component: Component) -> str:
    """Return from where a component's files are being transferred, as text to append; empty if none are."""
    if not component.awaits_files:
        return ""
    sources = sorted({source for source in component.sources if source != component.cluster})
    return f", its files come from {' and '.join(sources)}" if sources else ", its files are on their way"


def _format_since(component: Component, now: float) -> str:
    """Return since when a component is in its state, as text to append; empty if that is not recorded."""
    if component.unknown_since is not None and not component.has_ended:
        return f" (as known at {format_time(component.unknown_since, now, exact=True)})"
    phase_starts = {
        ComponentState.WAITING: component.submitted_at,
        ComponentState.SUBMITTED: component.submitted_at,
        ComponentState.CLAIMED: component.claimed_at,
        ComponentState.DELIVERING: component.ended_at,
        ComponentState.ENDED: component.ended_at,
    }.get(component.state)
    return "" if phase_starts is None else f" since {format_time(phase_starts, now, exact=True)}"


MAX_HISTORY_LENGTH = 50
MAX_CLOSED_CLUSTERS = 10
"""Maximum number of unusable clusters that are tested for whether their return would suffice."""
MAX_SINGLE_DRAINS = 5
"""Maximum number of drained clusters that are tested for whether a job needs that one, which takes milliseconds."""


def explain(
    queries: Queries, job: Job, timeline: Sequence[TimelineEntry], now: float, *, high_priority_allowed: bool = True
) -> Explanation:
    """Explain why a job is where it is. ``high_priority_allowed``: whether high priority may be suggested to the
    caller."""
    is_unfinished = queries.job(job.id) is not None
    array = None if is_unfinished or job.array_job is None or job.state.is_final else queries.job(job.array_job)
    if array is not None:  # a task that was not started waits with its array
        explanation = explain(queries, array, timeline, now, high_priority_allowed=high_priority_allowed)
        return replace(explanation, job=job.id, headline=f"{queries.waiting_reason(job)}: {explanation.headline}")
    if job.state is JobState.QUEUED and is_unfinished and job.is_deferred:
        explanation = _deferred(queries, job.id, job.spec, job.awaits, now)
    elif job.state is JobState.QUEUED and is_unfinished:
        dry_run = DryRun(queries, job, high_priority_allowed=high_priority_allowed)
        explanation = _queued_job(dry_run, job, timeline, now)
    else:
        explanation = current_state(job, timeline, queries, now)
        if job.state is JobState.HELD:
            explanation = _explain_hold(job, job.spec, explanation, queries)
    if is_unfinished and job.state.is_waiting and (dependents := queries.dependents_of(job.id)):
        explanation = replace(explanation, notes=(*explanation.notes, _describe_dependents(dependents)))
    tries = queries.tries(job.id) if is_unfinished else job.placement_tries
    return replace(explanation, tries=tries, reasons=_history(timeline))


def _describe_dependents(dependents: Sequence[JobId]) -> str:
    """Return which jobs wait for a waiting job, and that a change of it does not affect them, as text."""
    if len(dependents) == 1:
        return f"job {dependents[0]} waits for it, and keeps waiting for it if it is changed"
    return f"jobs {format_list([*map(str, dependents)])} wait for it, and keep waiting for it if it is changed"


def explain_submission(
    queries: Queries,
    spec: JobSpec,
    now: float,
    awaits: tuple[Clause, ...] = (),
    *,
    job: Job | None = None,
    high_priority_allowed: bool = True,
) -> Explanation:
    """Explain where a job would be placed if it were submitted now, or why it would wait.

    ``awaits``: the clauses of its dependencies that do not hold yet. ``job``: a waiting job that would be changed.
    """
    ident = None if job is None else job.id
    if job is not None and job.state is JobState.HELD:
        return _explain_hold(job, spec, current_state(job, (), queries, now), queries)
    if awaits or (spec.begin is not None and now < spec.begin):
        return _deferred(queries, ident, spec, awaits, now)
    dry_run = DryRun(queries, job, high_priority_allowed=high_priority_allowed)
    answer = dry_run.answer(spec)
    tried, excess = dry_run.is_tried_at_once(spec), queries.over_limit(spec)
    if isinstance(answer, Placement) and tried and excess is None:
        clusters, notes = _clusters(dry_run, spec, answer, (), {}, now)
        victims = f", where {dry_run.victims_text(spec)}" if dry_run.preempts(spec, answer) else ""
        headline = f"would be placed at once on {listed_where(answer)}{victims}"
        return Explanation(ident, JobState.PLACED, headline, clusters, notes, placement=answer)
    if excess is not None:
        headline = excess.waiting_reason
    elif not tried:
        headline = f"would wait behind job {queries.queues.head_before(spec, job)}"
    elif _is_reservation_in_the_way(dry_run, spec):
        keeper = dry_run.keeper(spec)
        headline = "" if keeper is None else queries.queues.plan.describe_keeper(keeper)
    else:
        headline = answer.summary if isinstance(answer, Refusal) else ""
    ahead = queries.queues.count_before(spec, job)
    return replace(_waiting(dry_run, spec, answer, headline, now), position=ahead + 1, ahead=ahead)


def _explain_hold(job: Job, spec: JobSpec, explanation: Explanation, queries: Queries) -> Explanation:
    """Add to the explanation of a held job whether there is room for it now. ``spec``: present, or changed."""
    answer = DryRun(queries, job).answer(spec)
    if isinstance(answer, Placement):
        note = f"there is room for it on {listed_where(answer)}"
    else:
        note = f"released now it would wait: {answer.summary}"
    return replace(explanation, notes=(note,), suffices=(f"its release (koala release {job.id})",))


def _deferred(
    queries: Queries, job: JobId | None, spec: JobSpec, awaits: tuple[Clause, ...], now: float
) -> Explanation:
    """Explain a job that waits for other jobs or its begin, and whether it would fit now."""
    answer = DryRun(queries).answer(spec)
    if spec.reservation:
        note = f"it gets nodes of reservation {spec.reservation}"
    elif isinstance(answer, Placement):
        note = f"there is room for it now on {listed_where(answer)}"
    else:
        note = f"now it would wait for nodes, too: {answer.summary}"
    return Explanation(job, JobState.QUEUED, describe_deferral(awaits, spec.begin, now), notes=(note,))


# A job that waits


def _queued_job(dry_run: DryRun, job: Job, timeline: Sequence[TimelineEntry], now: float) -> Explanation:
    """Explain why a queued job waits, at which position, and why it was queued again if it was."""
    queries = dry_run.queries
    answer = dry_run.answer(job.spec)
    explanation = _waiting(dry_run, job.spec, answer, queries.waiting_reason(job), now)
    returns = [e for e in timeline if e.event in ("requeued", "released")]
    notes = explanation.notes
    if returns and returns[-1].event == "requeued":
        notes = (f"queued again at {format_time(returns[-1].at, now, exact=True)}: {returns[-1].reason}", *notes)
    if isinstance(answer, Refusal) and answer.kind is RefusalKind.NODES and not queries.rules.plans_starts:
        notes = (*notes, NO_PLAN)
    position = queries.position(job.id)
    return replace(explanation, notes=notes, position=position, ahead=(position or 1) - 1)


def _waiting(dry_run: DryRun, spec: JobSpec, answer: Placement | Refusal, headline: str, now: float) -> Explanation:
    """Return the explanation of a waiting job, or of a submission that would wait."""
    queries, job = dry_run.queries, dry_run.job
    placement = answer if isinstance(answer, Placement) else None
    node_sources = tuple(dry_run.node_sources(spec)) if placement is None else ()
    refused = [dry_run.reasons(spec, source.view) for source in node_sources]
    lacking = _lacking(node_sources, refused, queries.grid.clusters())
    clusters, notes = _clusters(dry_run, spec, placement, refused[0] if refused else (), lacking, now)
    is_at_own_limit = job is not None and job.tasks is not None and not job.may_start_task
    if placement is not None and not is_at_own_limit:
        notes = (f"there is room for it on {listed_where(placement)}", *notes)
        if job is not None and not queries.rules.event_driven:
            notes = (*notes, f"scans come every {queries.rules.scan_interval:g} s: event_driven is off")
    elif isinstance(answer, Refusal) and answer.summary != headline:
        notes = (answer.summary, *notes)
    suffices = []
    if placement is None and queries.over_limit(spec) is None:
        suffices = [*enough_idle(lacking), *_enough_if_usable(dry_run, spec, node_sources)]
    if _is_reservation_in_the_way(dry_run, spec) and dry_run.keeper(spec) is not None:
        # Placing the other job first would not help, since it would then occupy these nodes.
        reserved = dry_run.keeper(spec)
        suffices.append(f"job {reserved}, for which nodes are kept, out of its way (koala hold {reserved})")
    elif (first := _must_be_placed_first(dry_run, spec)) is not None:
        suffices.append(f"job {first} placed before it")
    # A pause after failed attempts is not to be evaded.
    is_paused = job is not None and job.retry_at is not None and not job.refusals
    may_start = not (is_at_own_limit or is_paused) and queries.over_limit(spec) is None
    return Explanation(
        job.id if job is not None else None,
        job.state if job is not None else JobState.QUEUED,
        headline,
        clusters,
        notes,
        tuple(suffices),
        smallest_change=smallest_change(spec, dry_run) if may_start else None,
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
    """Return a finding for every cluster that concerns the request, and the reasons that belong to no cluster."""
    request, view, clusters = spec.request, dry_run.view(spec), dry_run.queries.grid.clusters()
    requested_clusters = {c.cluster for c in request.components} if isinstance(request, FixedRequest) else None
    if spec.reservation:
        requested_clusters = {cluster.name for cluster in view}
    reasons, findings = {reason.cluster: reason.reason for reason in refused}, []
    for cluster in clusters:
        if requested_clusters is not None and cluster.name not in requested_clusters:
            continue
        offered = view.get(cluster.name)
        idle = offered.idle if offered is not None else 0
        gives = placement.nodes_on(cluster.name) if placement is not None else 0
        reason = not_usable(cluster, now) or reasons.get(cluster.name) or ""
        if not reason and placement is not None:
            reason = f"{format_nodes(gives)} would be taken here" if gives else "not needed"
        if cluster.is_open and (holders := _holders(cluster, idle, dry_run.keeper(spec))):
            reason = f"{reason or f'{idle} of {cluster.last_report.total} nodes idle'} ({holders})"
        missing = lacking[cluster.name].nodes if cluster.name in lacking else None
        findings.append(finding_of(cluster, idle, gives=gives, reason=reason, missing=missing))
    names = {cluster.name for cluster in clusters}
    return tuple(findings), tuple(reason.reason for reason in refused if reason.cluster not in names)


def _lacking(
    node_sources: Sequence[NodeSource], refused: Sequence[Sequence[ClusterReason]], clusters: Sequence[ClusterStatus]
) -> dict[ClusterName, Lack]:
    """Return the fewest additional idle nodes on each cluster that would suffice, over all sources of nodes."""
    lacking: dict[ClusterName, Lack] = {}
    for source, reasons in zip(node_sources, refused, strict=True):
        missing = {reason.cluster: reason.missing for reason in reasons if reason.missing is not None}
        for cluster in clusters:
            name, offered = cluster.name, source.view.get(cluster.name)
            if cluster.is_open and name in missing and offered is not None:
                nodes = _more_idle(cluster, source, offered.idle + missing[name])
                if nodes is not None:
                    lack = Lack(nodes, source.beside if source.others(cluster) else "")
                    lacking[name] = min(lack, lacking.get(name, lack))
    return lacking


def _is_reservation_in_the_way(dry_run: DryRun, spec: JobSpec) -> bool:
    """Return whether only the nodes reserved for another job prevent the placement."""
    queries = dry_run.queries
    if not any(dry_run.reserved_nodes(cluster.name, spec) for cluster in queries.grid.clusters()):
        return False
    return isinstance(dry_run.ask(spec, queries.grid.view()), Placement)


def _must_be_placed_first(dry_run: DryRun, spec: JobSpec) -> JobId | None:
    """Return the job that has to be placed first; None if there is none."""
    job, mode = dry_run.job, dry_run.queries.rules.queue
    if mode == "scan" or (job is None and mode == "head"):
        return None
    if job is None:
        return dry_run.queries.queues.head_before(spec)
    head = dry_run.queries.queues.head(spec)
    return head if head != job.id else None


def _enough_if_usable(dry_run: DryRun, spec: JobSpec, node_sources: Sequence[NodeSource]) -> list[str]:
    """Return as text the clusters of which the return of a single one would suffice."""
    closed = [cluster for cluster in dry_run.queries.grid.clusters() if not cluster.is_open or cluster.nodes.doubted]
    texts = []
    for cluster in closed[:MAX_CLOSED_CLUSTERS]:
        if any(_is_enough_if_usable(dry_run, spec, source, cluster) for source in node_sources):
            if cluster.state is ClusterState.DRAINED:
                texts.append(f"{cluster.name} resumed (koala clusters resume {cluster.name})")
            elif cluster.state is ClusterState.UNUSABLE:
                texts.append(f"{cluster.name} mended (koala clusters clear {cluster.name})")
            elif cluster.state is ClusterState.UNREACHABLE:
                texts.append(f"{cluster.name} in reach again")
            elif cluster.nodes.doubted:
                texts.append(f"{cluster.name} giving nodes that it says are idle, which is tried again")
            else:
                texts.append(f"the component that is tried on {cluster.name} started")
    return texts


def _is_enough_if_usable(dry_run: DryRun, spec: JobSpec, source: NodeSource, cluster: ClusterStatus) -> bool:
    """Return whether a job would be placed if one cluster became usable with all nodes reported idle."""
    idle = max(0, source.offered(cluster, cluster.nodes.doubted))
    opened = tuple(
        replace(c.with_idle(idle), state=ClusterState.USABLE) if c.name == cluster.name else c
        for c in source.view.clusters
    )
    return isinstance(dry_run.ask(spec, replace(source.view, clusters=opened)), Placement)


NO_PLAN = (
    "no starts are planned here: jobs of fewer nodes may start before it until enough nodes are idle at one time; an "
    "operator has nodes kept for it by the rule plan_after"
)


def find_awaited_clusters(queries: Queries, job: Job) -> tuple[list[ClusterName], list[ClusterName]]:
    """Return the drained and unreachable clusters that keep a queued job waiting; none if it waits for other reasons.

    They do if the job would be placed on all of their nodes, or cannot be placed on those of the others. Also return
    those that are drained without an end, if the job cannot be placed on all nodes of all other clusters.
    """
    view = DryRun(queries, job).view(job.spec)
    absent = {c.name for c in view if c.state in (ClusterState.DRAINED, ClusterState.UNREACHABLE)}

    def is_placed(clusters: Iterable[ClusterView]) -> bool:
        answer = queries.questions.ask(job.spec, replace(view, clusters=tuple(clusters)))
        return isinstance(answer, Placement)

    def empty(cluster: ClusterView) -> ClusterView:
        down = queries.grid[cluster.name].last_report.down
        return replace(cluster.with_idle(cluster.total - down), state=ClusterState.USABLE)

    def is_needed_of(names: Collection[ClusterName]) -> bool:
        return not is_placed(c if c.name in names else empty(c) for c in view)

    if not absent or not is_placed(map(empty, view)):
        return [], []
    is_enough = is_placed(empty(c) if c.name in absent else c for c in view)
    drains = {c.name: queries.grid[c.name].drained for c in view}
    lasting = [name for name, drain in sorted(drains.items()) if drain is not None and drain.ends_at is None]
    needed = lasting if lasting and is_needed_of(lasting) else []
    needed = [name for name in needed[:MAX_SINGLE_DRAINS] if is_needed_of([name])] or needed
    return sorted(absent) if is_enough or needed or is_needed_of(absent) else [], needed


def _history(timeline: Sequence[TimelineEntry]) -> tuple[PastReason, ...]:
    """Return the timeline entries with a reason; of consecutive equal reasons only the last."""
    past: list[PastReason] = []
    for entry in timeline:
        if past and past[-1].reason == entry.reason:
            past.pop()
        if entry.reason:
            past.append(PastReason(entry.at, entry.event, entry.reason))
    return tuple(past[-MAX_HISTORY_LENGTH:])
