"""Try refused jobs on other clusters, and fail those that every cluster has refused (semantics 6, ADR 10).

Unknown words of a resource manager may concern the job, or the cluster. They bar the job from that cluster for a pause
that doubles. The same words for jobs of several kinds are an error of the cluster.
"""

import re

from koalapy.model.application import application_of
from koalapy.model.job import ClusterRefusal, Component, Job, JobId, JobState
from koalapy.model.request import ClusterName
from koalapy.model.wording import clock
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.attempts.cluster_health import ClusterHealth
from koalapy.scheduler.effects import AttemptFailure
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.queue.policy_evaluation import PolicyEvaluator
from koalapy.scheduler.state import SchedulerState
from koalapy.scheduler.timers import Deadline, doubled

REFUSED = "refused"
REFUSAL_PAUSE = 30.0
"""Seconds for which a job is not tried where it was refused in unknown words; each further refusal doubles it."""
MAX_REFUSAL_PAUSE = 3600.0
MAX_REFUSALS = 4
"""Refusals in unknown words, on all clusters together, after which a job that no other cluster could take fails."""
MAX_WORDS_LENGTH = 500
"""Characters of a refusal that are kept with a job."""

_WITH_DIGITS = re.compile(r"\S*\d\S*")


def refusal_text(refusal: ClusterRefusal, now: float) -> str:
    """``north has refused it, and is asked again at 10:00:30: no node hours left``."""
    again = "is not asked again"
    if refusal.until is not None:
        again = f"is asked again at {clock(refusal.until, now, exact=True)}"
    return f"{refusal.cluster} has refused it, and {again}: {refusal.words}"


def normalize_words(words: str, names: tuple[str, ...]) -> str:
    """Return a refusal without what differs between jobs: numbers, what contains digits, and ``names``."""
    words = _WITH_DIGITS.sub("#", words.casefold())
    for name in filter(None, names):
        words = re.sub(rf"(?<!\w){re.escape(name.casefold())}(?!\w)", "#", words)
    return " ".join(words.split())[:MAX_WORDS_LENGTH]


class Refusals:
    """Keeps which clusters have refused which jobs, and decides what follows."""

    def __init__(
        self,
        state: SchedulerState,
        attempts: Attempts,
        health: ClusterHealth,
        queues: PlacementQueues,
        evaluator: PolicyEvaluator,
    ) -> None:
        self._ledger, self._grid, self._timers, self._accounts = state.ledger, state.grid, state.timers, state.accounts
        self._attempts, self._health, self._queues, self._evaluator = attempts, health, queues, evaluator
        state.ledger.when_over.append(lambda job: self._timers.forget(job, 0, Deadline.REFUSAL))

    def fail_job(self, job: Job, component: Component, error: str, now: float) -> Job:
        """Fail a job whose refusal concerns it on every cluster."""
        self._note(job, component, error, now)
        return self._attempts.end(job, JobState.FAILED, f"{component.cluster} refused it: {error}", now)

    def try_elsewhere(self, job: Job, component: Component, error: str, *, for_good: bool, now: float) -> Job:
        """End the attempt of a job that a cluster has refused, and try the job elsewhere.

        ``for_good``: the cluster never takes such a job; else the words are unknown. Where no other cluster could take
        the job, it waits until it may be tried again, or fails.
        """
        self._note(job, component, error, now)
        is_error_of_cluster = not for_good and self._is_error_of_cluster(job, component.cluster, error, now)
        before = {refusal.cluster: refusal for refusal in job.refusals}
        times = before[component.cluster].times + 1 if component.cluster in before else 1
        pause = doubled(REFUSAL_PAUSE, times - 1, MAX_REFUSAL_PAUSE)
        until = None if for_good else now + pause
        refusal = ClusterRefusal(component.cluster, error[:MAX_WORDS_LENGTH], until, times)
        refusals = tuple(each for _, each in sorted((before | {component.cluster: refusal}).items()))
        job = self._ledger.change(job, refusals=refusals, claiming_tries=max(0, job.claiming_tries - 1))
        self._set_timer(job, refusal)
        reason = f"{REFUSED}: {refusal_text(refusal, now)}"
        if self._evaluator.may_be_placed(job.spec, frozenset(each.cluster for each in refusals)):
            return self._attempts.end(job, JobState.QUEUED, reason, now)
        unknown = [each for each in refusals if each.until is not None]
        if not unknown or (not is_error_of_cluster and sum(each.times for each in unknown) >= MAX_REFUSALS):
            words = "; ".join(f"{each.cluster}: {each.words}" for each in refusals)
            reason = f"every cluster that could take it has refused it: {words}"
            return self._attempts.end(job, JobState.FAILED, reason, now)
        retry_at = max(now, min(each.until for each in unknown if each.until is not None))
        job = self._ledger.change(job, retry_at=retry_at if retry_at > now else None)
        return self._attempts.end(job, JobState.QUEUED, reason, now)

    def pause_is_over(self, ident: JobId) -> None:
        """Try a job again on a cluster that has refused it."""
        job = self._ledger.get(ident)
        if job is not None:
            self._queues.bars_changed(job)

    def forget_refusals(self, cluster: ClusterName, *, unknown_only: bool = False) -> None:
        """Forget what a cluster has refused, or what of it was in unknown words: it has been mended."""
        for job in list(self._ledger.jobs.values()):
            left = tuple(
                refusal
                for refusal in job.refusals
                if refusal.cluster != cluster or (unknown_only and refusal.until is None)
            )
            if left != job.refusals:
                self._queues.bars_changed(self._ledger.change(job, refusals=left))

    def restore_timers(self, job: Job) -> None:
        """Take up the refusals of a job of an earlier life."""
        for refusal in job.refusals:
            self._set_timer(job, refusal)

    def _note(self, job: Job, component: Component, error: str, now: float) -> None:
        self._ledger.count_failed_attempt(component.cluster, AttemptFailure.REFUSED)
        self._ledger.note(job, now, "error", error, component)

    def _is_error_of_cluster(self, job: Job, name: ClusterName, error: str, now: float) -> bool:
        """Return whether jobs of several kinds were refused in these words, and count that as an error if so."""
        spec = job.spec
        names = spec.owner, self._accounts.local_user(spec.owner, name), spec.name, application_of(spec)
        kind = spec.owner, application_of(spec), spec.request
        if not self._grid[name].unknown_refusals.add(normalize_words(error, names), kind):
            return False
        self._health.count_error(name, f"jobs of several users or kinds are refused in the same words: {error}", now)
        return True

    def _set_timer(self, job: Job, refusal: ClusterRefusal) -> None:
        if refusal.until is not None:
            self._timers.add(refusal.until, Deadline.REFUSAL, job=job.id)
