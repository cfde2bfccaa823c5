"""Say why a queued job is not placed."""

from koalapy.model.job import ClusterRefusal, Job, JobId
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_time
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.queue.policy_calls import PolicyEvaluator
from koalapy.scheduler.queue.queue import Shape
from koalapy.scheduler.state import SchedulerState


def refusal_text(refusal: ClusterRefusal, now: float) -> str:
    """Return ``north has refused it, and is asked again at 10:00:30: no node hours left``."""
    again = "is not asked again"
    if refusal.until is not None:
        again = f"is asked again at {format_time(refusal.until, now, exact=True)}"
    return f"{refusal.cluster} has refused it, and {again}: {refusal.words}"


class WaitingReasons:
    """The reasons of waiting jobs, worked out once for all jobs of a shape until something happens."""

    def __init__(self, state: SchedulerState, queues: PlacementQueues, evaluator: PolicyEvaluator) -> None:
        self._state, self._rules, self._grid = state, state.rules, state.grid
        self._queues, self._evaluator = queues, evaluator
        self._idle = state.grid.lens(lambda cluster: cluster.idle)
        self._refusals: dict[Shape, str] = {}
        """Why jobs of a shape are refused; empty where they would be placed."""

    def invalidate(self) -> None:
        """Forget what was worked out: something has happened."""
        self._refusals.clear()

    def of(self, job: Job) -> str:
        """Return why a queued job is not placed."""
        now = self._state.now
        refusals = "; ".join(refusal_text(each, now) for each in job.refusals if each.bars(now))
        if job.retry_at is not None:
            again = f"is tried again at {format_time(job.retry_at, job.retry_at, exact=True)}"
            if refusals:
                return f"{again}: {refusals}"
            return f"{again}, after {'a failed attempt' if job.restarts == 1 else f'{job.restarts} failed attempts'}"
        if (excess := self._state.owner_use.of(job.spec, now)) is not None:
            return excess.waiting_reason
        if (head := self._in_front_of(job)) is not None:
            return f"waits behind job {head}"
        barred = job.barred_clusters(now)
        shape = self._queues.shape(job.spec, barred)
        refusal = self._refusals.get(shape)
        if refusal is None:
            refusal = self._refusals[shape] = self._policy_refusal(job, barred)
        if refusal:
            return "; ".join(filter(None, (refusal, refusals)))
        reservation = self._queues.reservation
        keeper = reservation.keeper(job.id)
        if keeper is not None and (job.id == reservation.job or reservation.is_kept_from(job.spec.priority)):
            return f"nodes are kept for job {keeper}, which has waited longer"
        return "fits, and waits for the next scan"

    def _in_front_of(self, job: Job) -> JobId | None:
        """Return the job that keeps one waiting by its place; None for the head, and for one that is passed over."""
        queue = self._queues[job.spec.priority]
        if self._rules.queue == "scan" or (job.id in queue and queue.is_hopeless(queue.group_of(job.id))):
            return None
        head = self._queues.head(job.spec)
        return head if head != job.id else None

    def _policy_refusal(self, job: Job, barred: frozenset[ClusterName]) -> str:
        """Return why the job's policy does not place it; empty where it would."""
        answer = self._evaluator.evaluate(job.spec, self._grid.view(), barred)
        if isinstance(answer, Placement):
            return ""
        held_back = [cluster for cluster in self._grid.clusters() if cluster.available < cluster.idle]
        beside = self._evaluator.evaluate(job.spec, self._idle.view(), barred) if held_back else answer
        if isinstance(beside, Refusal):
            return answer.summary
        used = [cluster for cluster in held_back if beside.nodes_on(cluster.name) > cluster.available]
        return "; ".join(f"{cluster.name} {cluster.held_back}" for cluster in used) or answer.summary
