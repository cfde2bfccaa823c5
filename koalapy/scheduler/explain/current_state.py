"""The current state of a job that is not queued: where it is and why there, what it waits for, or how it ended."""

from collections.abc import Iterator, Sequence

from koalapy.model.explanation import ClusterFinding, Explanation
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState, TimelineEntry
from koalapy.model.placement import PlacedComponent, Placement
from koalapy.model.wording import format_bytes, format_list, format_nodes, format_time
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.explain.cluster_findings import finding_of
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.state import LrmWaits


def current_state(
    job: Job, timeline: Sequence[TimelineEntry], grid: GridStatus, waits: LrmWaits, rules: Rules, now: float
) -> Explanation:
    """Of a job that is active, held or over; what came before is left to the caller."""
    attempt = job.attempt
    headline = _headline(job, attempt, grid, waits, rules, now)
    if attempt is None or job.state is JobState.HELD:
        return Explanation(job.id, job.state, headline)
    return Explanation(
        job.id,
        job.state,
        headline,
        clusters=tuple(_findings(attempt, grid, now)) if job.state.is_active else (),
        placement=_placement(attempt, timeline),
    )


def _placement(attempt: Attempt, timeline: Sequence[TimelineEntry]) -> Placement:
    """Where the attempt is, and what the policy said when it was placed there."""
    reasons = [e.reason for e in timeline if e.event == "placed" and e.generation == attempt.generation]
    components = tuple(
        PlacedComponent(c.size, c.cluster, c.request_index, node_class=c.node_class) for c in attempt.gang
    )
    return Placement(components, reasons[-1] if reasons else "")


def _headline(job: Job, attempt: Attempt | None, grid: GridStatus, waits: LrmWaits, rules: Rules, now: float) -> str:
    if job.state is JobState.HELD:
        return "held" if job.reason in ("", "held") else f"held: {job.reason}"
    if job.state.is_final:
        ended = "" if job.ended_at is None else f" at {format_time(job.ended_at, now)}"
        return f"{job.state}{ended}" + (f": {job.reason}" if job.reason not in ("", job.state) else "")
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
        return f"runs since {format_time(started, now)} on {_where(attempt.gang)}"
    if job.state is JobState.STARTING:
        return "every node has reported, and the program is being launched"
    starting = [c for c in attempt.gang if (waits.up_by(job.token(c.index)) or now) > now]
    reasons = {c.cluster: waits.reason(job.token(c.index)) for c in attempt.gang if c.state is ComponentState.WAITING}
    if starting:
        at = max(waits.up_by(job.token(c.index)) or now for c in starting)
        headline = f"the nodes of {_components(starting)} on {_names(starting)} are being started, "
        headline += f"which takes until {format_time(at, now, exact=True)} at most"
    else:
        headline = _claiming(attempt, rules, now)
    lrm_reasons = "".join(f"; {name}: {reason}" for name, reason in sorted(reasons.items()) if reason)
    return headline + lrm_reasons + _lrm_problems(attempt, grid)


def _where(components: Sequence[Component]) -> str:
    return format_list([f"{c.cluster} ({format_nodes(c.size)})" for c in components])


def _out_of_reach(attempt: Attempt, now: float) -> str:
    lost = [c for c in attempt.gang if c.unknown_since is not None and not c.has_ended]
    if not lost:
        return "a cluster is out of reach"
    since = min(c.unknown_since for c in lost if c.unknown_since is not None)
    names = sorted({c.cluster for c in lost})
    are = "is" if len(names) == 1 else "are"
    return f"{format_list(names)} {are} out of reach since {format_time(since, now)}: what runs there is not known"


def _lrm_problems(attempt: Attempt, grid: GridStatus) -> str:
    """What the clusters of a gang that is not complete say is the matter with their resource managers."""
    awaited = {c.cluster for c in attempt.gang if c.state is not ComponentState.CLAIMED}
    return "".join(f"; {name}: {grid[name].problem}" for name in sorted(awaited) if name in grid and grid[name].problem)


def _claiming(attempt: Attempt, rules: Rules, now: float) -> str:
    """What keeps the barrier closed: the components that are farthest from it."""
    by_state: dict[ComponentState, list[Component]] = {}
    for component in attempt.gang:
        by_state.setdefault(component.state, []).append(component)
    if placed := by_state.get(ComponentState.PLACED):
        at = attempt.claim_at if attempt.claim_at is not None else now
        what = "its nodes" if len(placed) == len(attempt.gang) else f"the nodes of {_components(placed)}"
        awaited = f"; {_files(attempt, now)}" if _awaited(attempt) else ""
        return f"placed on {_where(attempt.gang)}{awaited}; asks for {what} at {format_time(at, now, exact=True)}"
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
    """The components to which files are on their way."""
    return [component for component in attempt.gang if component.awaits_files]


def _files(attempt: Attempt, now: float) -> str:
    """How far the files are, and when they are expected."""
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
"""From so many claims on, and so large a part of them in vain, that is worth telling."""

STATE_TEXTS = {
    ComponentState.PLACED: "its nodes are not asked for yet",
    ComponentState.SUBMITTED: "being handed to the resource manager",
    ComponentState.WAITING: "queued in the resource manager",
    ComponentState.CLAIMED: "every node has reported, waits at the barrier for the others",
    ComponentState.RUNNING: "runs",
    ComponentState.STOPPING: "was told to end",
    ComponentState.DELIVERING: "has ended, and what it has to bring is on its way",
    ComponentState.ENDED: "has ended",
}


def _findings(attempt: Attempt, grid: GridStatus, now: float) -> Iterator[ClusterFinding]:
    """The clusters of the gang, and how its components stand there."""
    for name in dict.fromkeys(component.cluster for component in attempt.gang):
        there = [c for c in attempt.gang if c.cluster == name]
        texts = [f"component {c.rank}: {STATE_TEXTS[c.state]}{_since(c, now)}{_from(c)}" for c in there]
        if name in grid:
            texts += _shown_by_claims(grid[name], there, now)
            yield finding_of(
                grid[name],
                grid[name].available,
                gives=sum(c.size for c in there),
                reason=format_list(texts, separator="; "),
            )


def _shown_by_claims(cluster: ClusterStatus, components: Sequence[Component], now: float) -> list[str]:
    """Return how claims fared there lately, if not all went well and a component has no nodes yet."""
    claims, in_vain = cluster.evidence.claims(now), cluster.evidence.share_in_vain(now)
    awaits = any(c.state in NOT_CLAIMED for c in components)
    if not awaits or claims < MIN_CLAIMS or in_vain < MIN_SHARE_IN_VAIN:
        return []
    return [f"of claims there {in_vain:.0%} came to nothing lately"]


def _from(component: Component) -> str:
    if not component.awaits_files:
        return ""
    sources = sorted({source for source in component.sources if source != component.cluster})
    return f", its files come from {' and '.join(sources)}" if sources else ", its files are on their way"


def _since(component: Component, now: float) -> str:
    if component.unknown_since is not None:
        return f" (as known at {format_time(component.unknown_since, now, exact=True)})"
    at = {
        ComponentState.WAITING: component.submitted_at,
        ComponentState.SUBMITTED: component.submitted_at,
        ComponentState.CLAIMED: component.claimed_at,
        ComponentState.DELIVERING: component.ended_at,
        ComponentState.ENDED: component.ended_at,
    }.get(component.state)
    return "" if at is None else f" since {format_time(at, now, exact=True)}"
