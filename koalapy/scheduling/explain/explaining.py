"""Why? The binding reason of a job that waits, what would suffice, and the smallest change that would place it now."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from koalapy.model.cluster import ClusterState
from koalapy.model.explanation import ClusterFinding, Explanation, PastReason
from koalapy.model.job import Job, JobId, JobSpec, JobState, Priority, TimelineEntry
from koalapy.model.moment import clock
from koalapy.model.placement import Placement, Refusal
from koalapy.scheduling.explain.changes import smallest_change
from koalapy.scheduling.explain.findings import Kept, findings, listed_where, sufficient
from koalapy.scheduling.explain.standing import standing
from koalapy.scheduling.explain.trial import Trial
from koalapy.scheduling.scheduler import Scheduler

LONGEST_HISTORY = 50
MOST_CLUSTERS = 10
"""Of so many clusters that are not usable it is worked out whether their return would do."""


def explain(scheduler: Scheduler, job: Job, timeline: Sequence[TimelineEntry], now: float) -> Explanation:
    """Why a job is where it is; ``now`` in seconds since the epoch."""
    known = scheduler.job(job.id) is not None
    if job.state is JobState.QUEUED and known:
        found = _waiting(scheduler, job, timeline, now)
    else:
        found = standing(job, timeline, scheduler.grid, scheduler.waits, scheduler.rules, now)
        if job.state is JobState.HELD:
            found = replace(
                found, notes=(_if_released(scheduler, job),), suffices=(f"its release (koala release {job.id})",)
            )
    tries = scheduler.tries(job.id) if known else job.placement_tries
    return replace(found, tries=tries, reasons=_history(timeline))


def _if_released(scheduler: Scheduler, job: Job) -> str:
    answer = Trial(scheduler, job).answer(job.spec)
    if isinstance(answer, Placement):
        return f"there is room for it on {listed_where(answer)}"
    return f"released now it would wait: {answer.summary}"


def explain_submission(scheduler: Scheduler, spec: JobSpec, now: float) -> Explanation:
    """Where a job would go if it were submitted now, and why not elsewhere; or why it would wait."""
    trial = Trial(scheduler)
    answer = trial.answer(spec)
    tried = trial.is_tried_at_once(spec.priority)
    if isinstance(answer, Placement) and tried:
        clusters, notes = _clusters(scheduler, spec, trial, answer, None, now)
        others = ", where it would preempt others" if trial.preempts(spec, answer) else ""
        headline = f"would be placed at once on {listed_where(answer)}{others}"
        return Explanation(None, JobState.PLACED, headline, clusters, notes, placement=answer)
    if not tried:
        headline = f"would wait behind job {_head(scheduler, spec.priority)}"
    elif _kept(scheduler, spec, trial, None):
        headline = f"nodes are kept for job {scheduler.reservation}, which has waited longer"
    else:
        headline = answer.summary if isinstance(answer, Refusal) else ""
    found = _refused(scheduler, spec, None, trial, answer, headline, now)
    position = 1 + sum(1 for _ in _queued(scheduler, spec.priority))
    return replace(found, position=position, ahead=position - 1)


# A job that waits


def _waiting(scheduler: Scheduler, job: Job, timeline: Sequence[TimelineEntry], now: float) -> Explanation:
    trial = Trial(scheduler, job)
    answer = trial.answer(job.spec)
    found = _refused(scheduler, job.spec, job, trial, answer, scheduler.waiting_reason(job), now)
    again = [e for e in timeline if e.event in ("requeued", "released")]
    notes = found.notes
    if again and again[-1].event == "requeued":
        notes = (f"queued again at {clock(again[-1].at, now, exact=True)}: {again[-1].reason}", *notes)
    position = scheduler.position(job.id)
    return replace(found, notes=notes, position=position, ahead=(position or 1) - 1)


def _refused(
    scheduler: Scheduler,
    spec: JobSpec,
    job: Job | None,
    trial: Trial,
    answer: Placement | Refusal,
    headline: str,
    now: float,
) -> Explanation:
    """What is common to a job that waits and to a submission that would."""
    placement = answer if isinstance(answer, Placement) else None
    clusters, notes = _clusters(scheduler, spec, trial, placement, job, now)
    if placement is not None:
        notes = (f"there is room for it on {listed_where(placement)}", *notes)
        if job is not None and not scheduler.rules.event_driven:
            notes = (*notes, f"scans come every {scheduler.rules.scan_interval:g} s: event_driven is off")
    elif isinstance(answer, Refusal) and answer.summary != headline:
        notes = (answer.summary, *notes)
    suffices = sufficient(clusters) if placement is None else []
    suffices += _if_usable_again(scheduler, spec, trial) if placement is None else []
    if _kept(scheduler, spec, trial, job):
        # Once it is placed, it has them: that alone is no help.
        reserved = scheduler.reservation
        suffices.append(f"job {reserved}, for which nodes are kept, out of its way (koala hold {reserved})")
    elif (before := _before(scheduler, job, spec.priority)) is not None:
        suffices.append(f"job {before} placed before it")
    change = smallest_change(scheduler, spec, trial)
    ident, state = (job.id, job.state) if job is not None else (None, JobState.QUEUED)
    return Explanation(
        ident, state, headline, clusters, notes, tuple(suffices), smallest_change=change, placement=placement
    )


def _clusters(
    scheduler: Scheduler, spec: JobSpec, trial: Trial, placement: Placement | None, job: Job | None, now: float
) -> tuple[tuple[ClusterFinding, ...], tuple[str, ...]]:
    """Cluster by cluster, and what was said of none of them."""
    view = trial.view(spec.priority)
    refused = () if placement is not None else scheduler.reasons(spec, view)
    clusters = scheduler.grid.clusters()
    kept = {cluster.name: trial.kept(cluster.name, spec.priority) for cluster in clusters}
    found = findings(spec.request, clusters, view, placement, refused, Kept(scheduler.reservation, kept), now)
    names = {cluster.name for cluster in clusters}
    return tuple(found), tuple(reason.reason for reason in refused if reason.cluster not in names)


def _kept(scheduler: Scheduler, spec: JobSpec, trial: Trial, job: Job | None) -> bool:
    """Whether only the nodes kept for another job are in the way."""
    reserved = scheduler.reservation
    if reserved is None or spec.priority is not Priority.LOW or (job is not None and job.id == reserved):
        return False
    return isinstance(trial.ask(spec, scheduler.grid.view()), Placement)


def _before(scheduler: Scheduler, job: Job | None, priority: Priority) -> JobId | None:
    """The one job that has to be placed first."""
    mode = scheduler.rules.queue
    if mode == "scan" or (job is None and mode == "head"):
        return None
    head = _head(scheduler, priority)
    return head if head != (job.id if job is not None else None) else None


def _queued(scheduler: Scheduler, priority: Priority) -> Iterator[Job]:
    return (j for j in scheduler.jobs() if j.waits and j.spec.priority is priority)


def _head(scheduler: Scheduler, priority: Priority) -> JobId | None:
    narrowest = scheduler.rules.queue_order == "narrowest-first"
    queued = [
        (job.spec.request.total_size if narrowest else 0, job.queue_seq, job.id) for job in _queued(scheduler, priority)
    ]
    return min(queued)[2] if queued else None


def _if_usable_again(scheduler: Scheduler, spec: JobSpec, trial: Trial) -> list[str]:
    """The clusters whose return, each alone, would do."""
    view = trial.view(spec.priority)
    closed = [cluster for cluster in scheduler.grid.clusters() if not cluster.is_open or cluster.doubted][
        :MOST_CLUSTERS
    ]
    texts = []
    for cluster in closed:
        idle = max(0, cluster.trusted_available - trial.kept(cluster.name, spec.priority))
        opened = tuple(
            replace(c, state=ClusterState.USABLE, idle=idle) if c.name == cluster.name else c for c in view.clusters
        )
        if isinstance(trial.ask(spec, replace(view, clusters=opened)), Placement):
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


def _history(timeline: Sequence[TimelineEntry]) -> tuple[PastReason, ...]:
    """The lines of the timeline that say why; of those that say the same one after the other the last."""
    past: list[PastReason] = []
    for entry in timeline:
        if past and past[-1].reason == entry.reason:
            past.pop()
        if entry.reason:
            past.append(PastReason(entry.at, entry.event, entry.reason))
    return tuple(past[-LONGEST_HISTORY:])
