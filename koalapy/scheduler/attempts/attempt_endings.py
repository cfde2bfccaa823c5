"""The end of an attempt, and what its job becomes then."""

from koalapy.model.job import Component, ComponentState, Job, JobId, JobState, Token
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.attempts.cluster_health import ClusterHealth
from koalapy.scheduler.claims import staging
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.state import SchedulerState
from koalapy.scheduler.timers import Deadline


class AttemptEndings:
    """Brings jobs whose attempts have ended to their final state, or back to the placement queues."""

    def __init__(
        self, state: SchedulerState, attempts: Attempts, health: ClusterHealth, queues: PlacementQueues
    ) -> None:
        self._ledger, self._timers = state.ledger, state.timers
        self._experience = state.experience
        self._attempts, self._health, self._queues = attempts, health, queues

    def settle(self, token: Token, now: float) -> None:
        """Of the job whose component a token names."""
        found = self._ledger.find(token)
        if found is not None:
            self.settle_job(found[0], now)

    def settle_job(self, job: Job, now: float) -> None:
        """When nothing of an ended attempt is left that can be waited for, the job becomes what it was to become."""
        if job.ending is None:
            return
        # As a rule they end in their order: of very many, the last one tells at once.
        if any(_must_be_awaited(job, component) for component in reversed(live(job).components)):
            return
        attempt = live(job)
        for component in attempt.components:
            if component.state is not ComponentState.ENDED:
                self._attempts.give_up(job, component, now)
        for component in attempt.gang:
            staging.end(self._ledger, job, component)
        self._timers.forget(job.id, job.generation)
        becomes, reason = job.ending, attempt.end_reason
        if becomes is JobState.QUEUED:
            self._requeue(self._ledger.move(job, becomes, now, "requeued", reason, ending=None), now)
            return
        # A program that came to its own end was carried there by its clusters, whatever it made of it.
        if becomes is JobState.SUCCEEDED or (becomes is JobState.FAILED and attempt.exit_code is not None):
            for component in attempt.gang:
                self._health.count_success(component.cluster)
        event = str(becomes)
        job = self._ledger.move(
            job,
            becomes,
            now,
            event,
            reason,
            ending=None,
            ended_at=attempt.ended_at,
            exit_code=attempt.exit_code,
            retry_at=None,
        )
        self._experience.learn(job)

    def _requeue(self, job: Job, now: float) -> None:
        """Back to the placement queue, at once or after the pause that its failures have earned it."""
        if job.retry_at is None or job.retry_at <= now:
            self._queues.requeue(job)
        else:
            self.pause(job, job.retry_at)

    def pause_is_over(self, job_id: JobId, at: float) -> None:
        """A job that waited for its next try queues again, unless it was held or cancelled meanwhile."""
        job = self._ledger.get(job_id)
        if job is not None and job.state is JobState.QUEUED and job.retry_at == at:
            self._queues.requeue(job)

    def pause(self, job: Job, until: float) -> None:
        """A queued job is tried again, but not before then."""
        self._queues.pause(job)
        self._timers.add(until, Deadline.RETRY, job=job.id)


def _must_be_awaited(job: Job, component: Component) -> bool:
    """Whether the job cannot go on before this component has ended.

    One that still sends its output is waited for when the job is about to be over, not when it is to be queued again.
    One out of reach is not waited for, unless it may be running the program and the job is to be started again: no
    job may live twice, so that has to wait until the cluster is back or counts as lost.
    """
    if component.state is ComponentState.ENDED:
        return False
    out_of_reach = component.unknown_since is not None
    if component.state is ComponentState.DELIVERING:
        return not out_of_reach and job.ending is not JobState.QUEUED
    may_run = live(job).barrier_at is not None and not component.superseded
    return not out_of_reach or (job.ending is JobState.QUEUED and may_run)
