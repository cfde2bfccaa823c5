"""Decide, after a failure or rejection, whether and where a job is tried again and which cluster is at fault.

A rejected job is tried on other clusters, and fails once all have rejected it (semantics 6, ADR 10). An unrecognized
message bars the job from the cluster for a pause that doubles. The same message for jobs of several kinds is an error
of the cluster.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from koalapy.model.application import application_of
from koalapy.model.bounds import MAX_NODES
from koalapy.model.job import ClusterRefusal, Component, Job, JobId, JobState, RefusalCause, add_refusal
from koalapy.model.reports import Refusal, RefusedSizes
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_nodes
from koalapy.scheduler.arrays import Arrays
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.attempts.facts import INFRASTRUCTURE_FAILURE, TRANSFER_FAILURE
from koalapy.scheduler.attempts.health import ClusterHealth
from koalapy.scheduler.attempts.link_paths import LinkPaths
from koalapy.scheduler.claims.claim import Claiming
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.candidates import refusal_text
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.queue.questions import PolicyQuestions
from koalapy.scheduler.state import Deadline, SchedulerState, backoff_pause

REFUSED = "refused"
MAX_REFUSALS = 4
"""Unrecognized rejections on all clusters together after which a job fails that no other cluster could take."""
MAX_WORDS_LENGTH = 500
"""Characters of a rejection message that are kept with a job."""

_WITH_DIGITS = re.compile(r"\S*\d\S*")


def normalize_words(message: str, names: tuple[str, ...]) -> str:
    """Return a rejection message without what differs between jobs: words with digits, and ``names``."""
    message = _WITH_DIGITS.sub("#", message.casefold())
    for name in filter(None, names):
        message = re.sub(rf"(?<!\w){re.escape(name.casefold())}(?!\w)", "#", message)
    return " ".join(message.split())[:MAX_WORDS_LENGTH]


class Failures:
    """The decisions after failures: whether a job is tried again, and whether its cluster is at fault."""

    def __init__(
        self,
        state: SchedulerState,
        attempts: Attempts,
        claiming: Claiming,
        health: ClusterHealth,
        queues: PlacementQueues,
        questions: PolicyQuestions,
        arrays: Arrays,
        link_paths: LinkPaths,
    ) -> None:
        self._rules, self._ledger, self._grid, self._lrm_waits = state.rules, state.ledger, state.grid, state.lrm_waits
        self._timers, self._accounts = state.timers, state.accounts
        self._attempts, self._claiming, self._health = attempts, claiming, health
        self._queues, self._questions, self._arrays, self._link_paths = queues, questions, arrays, link_paths
        state.ledger.on_job_removed.append(lambda job: self._timers.cancel(job.id, 0, Deadline.REFUSAL))

    def handle_infrastructure_failure(
        self,
        job: Job,
        component: Component,
        failure: AttemptFailure,
        error: str,
        now: float,
        *,
        is_elsewhere: bool = False,
    ) -> Job:
        """End an attempt that failed without a fault of its program, count the error, and retry the job.

        ``is_elsewhere``: the cause is outside the component's site, or a loss of power: not an error of its cluster.
        """
        self._ledger.count_failed_attempt(component.cluster, failure)
        if component.claimed_at is None:
            self._grid[component.cluster].health.evidence.record_failed(now)
        self._ledger.record_event(job, now, "error", error, component)
        self._link_paths.learn_from_failed_start(job, component.cluster, now)
        if not is_elsewhere:
            job = self._count_failure(job, component.cluster, error, now)
            self._health.count_error(component.cluster, error, now, job.array_job or job.id)
        kind = TRANSFER_FAILURE if failure is AttemptFailure.RESULTS else INFRASTRUCTURE_FAILURE
        return self.restart_job(job, f"{kind}: {component.cluster}: {error}", now)

    def _count_failure(self, job: Job, cluster: ClusterName, error: str, now: float) -> Job:
        """Count a failure of a job on a cluster.

        After ``error_threshold`` failures the job avoids the cluster for a pause, as all jobs avoid an unusable one.
        """
        array = None if job.array_job is None else self._ledger.get(job.array_job)
        previous = (r for r in (array or job).refusals if r.cluster == cluster and r.cause is RefusalCause.FAILURE)
        failure = next(previous, ClusterRefusal(cluster, "", now, 0, RefusalCause.FAILURE))
        if not failure.bars(now):
            times, until = failure.times + 1, now
            excess = times - max(2, self._rules.error_threshold)
            if excess >= 0:
                until += backoff_pause(self._rules.probation_pause, excess, self._rules.probation_pause_max)
            failure = replace(failure, words=error[:MAX_WORDS_LENGTH], until=until, times=times)
        for holder in filter(None, (array, job)):
            holder = self._ledger.change_job(holder, refusals=add_refusal(holder.refusals, failure))
            if failure.until is not None and failure.bars(now):
                self._timers.add(failure.until, Deadline.REFUSAL, job=holder.id)
                self._queues.regroup_job(holder)
        return self._ledger.jobs[job.id]

    def handle_exceeded_limit(self, job: Job, component: Component, error: str, now: float) -> Job:
        """Fail a job that exceeded a limit such as memory. No cluster is at fault."""
        reason = f"{component.cluster}: {error}"
        if (job.ending, job.reason) == (JobState.FAILED, reason):
            return job
        self._ledger.record_event(job, now, "error", error, component)
        for member in live(job).gang:
            self._health.count_success(member.cluster)
        job = self._ledger.change_job(job, retry_at=None)
        # Without an exit code, so that an infrastructure failure reported later does not override it.
        return self._attempts.end_attempt(job, JobState.FAILED, reason, now)

    def handle_refusal(
        self, job: Job, component: Component, concerns: Refusal, sizes: RefusedSizes, error: str, now: float
    ) -> Job:
        """Handle a rejection by a component's resource manager.

        ``concerns``: the scope of the rejection; ``sizes``: the sizes that it bars, besides that of the component.
        """
        if concerns == "job":
            self._note_refusal(job, component, error, now)
            self._arrays.give_up_array_of(job, f"{component.cluster} refused its task: {error}", now)
            return self._attempts.end_attempt(job, JobState.FAILED, f"{component.cluster} refused it: {error}", now)
        if concerns != "limit" or sizes == "few":
            bounds = (component.size, MAX_NODES) if sizes == "many" else (1, component.size if sizes else MAX_NODES)
            return self._try_elsewhere(job, component, error, bounds, for_good=concerns == "unsuitable", now=now)
        cluster = component.cluster
        self._health.set_limit(cluster, component.size, error, now)
        return self._claiming.replace_failed_component(
            job, component, ClaimFailure.LIMIT, f"{cluster} takes no more: {error}", now
        )

    def end_cluster_probation(self, cluster: ClusterName) -> None:
        """End a cluster's probation after a program has started there, and forget its unrecognized rejections."""
        if self._health.end_probation(cluster):
            self.forget_refusals(cluster, unknown_only=True)

    def handle_claim_timeout(self, job: Job, component: Component, now: float) -> Job:
        """Handle a component that did not get its nodes in time. This is not an error of the cluster."""
        cluster, token = component.cluster, job.token(component.index)
        pending, is_limited = self._lrm_waits.reason(token), self._lrm_waits.is_limited(token)
        if reason := self._lrm_problems([component]):
            failure = ClaimFailure.RESOURCE_MANAGER
        elif pending:
            failure, reason = ClaimFailure.NOT_STARTED, f"{cluster} did not start it: {pending}"
        elif unreleased := self._grid[cluster].nodes.unreleased_nodes(token):
            failure, reason = ClaimFailure.KEPT, f"{cluster} does not let go of {format_nodes(unreleased)}"
        else:
            failure, reason = ClaimFailure.LOCAL_USERS, f"local users of {cluster} were faster"
        if is_limited and self._accounts.local_user(job.spec.owner, cluster):
            # Other accounts have other limits.
            bounds = component.size, MAX_NODES
            problem = pending[:MAX_WORDS_LENGTH]
            job, _ = self._attempts.bar_cluster(job, cluster, problem, now, bounds, counts=False)
            self._arrays.share_refusals(job)
        elif is_limited:
            self._health.set_limit(cluster, component.size, pending, now)
        job = self._claiming.replace_failed_component(job, component, failure, reason, now)
        if not is_limited:
            since = component.submitted_at or now
            self._health.record_failed_claim(cluster, token, component.size, now, since, pending)
        return job

    def handle_timeout(
        self,
        job: Job,
        component: Component,
        failure: AttemptFailure,
        error: str,
        silent: Sequence[Component],
        now: float,
    ) -> Job:
        """Handle an event that has not happened in time, possibly for problems of the clusters of ``silent``."""
        message = "; ".join(filter(None, (error, self._lrm_problems(silent))))
        return self.handle_infrastructure_failure(job, component, failure, message, now)

    def _lrm_problems(self, components: Sequence[Component]) -> str:
        """Return the reported problems of the components' resource managers."""
        problems = {c.cluster: self._grid[c.cluster].last_report.problem for c in components}
        return "; ".join(f"{cluster}: {problem}" for cluster, problem in sorted(problems.items()) if problem)

    def restart_job(self, job: Job, reason: str, now: float, *, exit_code: int | None = None) -> Job:
        """End the attempt and retry the job after a pause that doubles; fail it after too many restarts."""
        rules = self._rules
        limit = job.spec.max_restarts if job.spec.max_restarts is not None else rules.max_restarts
        if limit is not None and job.restarts >= limit:
            reason = f"{reason} (gave up after {limit} restarts)"
            return self._attempts.end_attempt(job, JobState.FAILED, reason, now, exit_code=exit_code)
        number = job.restarts + 1
        pause = backoff_pause(rules.restart_pause, number - 2, rules.restart_pause_max) if number > 1 else 0.0
        barred = job.barred_sizes(now)
        if barred and self._questions.refusal_on_empty_grid(job.spec, barred):
            ends = [refusal.until for refusal in job.refusals if refusal.until is not None and refusal.until > now]
            pause = max(pause, min(ends, default=now) - now)
        plan = f"restart {number}" if limit is None else f"restart {number} of {limit}"
        if pause:
            plan += f", next try after {pause:.3g} s"
        job = self._ledger.change_job(job, restarts=number, retry_at=now + pause if pause else None)
        return self._attempts.end_attempt(job, JobState.QUEUED, f"{reason} ({plan})", now, exit_code=exit_code)

    # Refusals of resource managers

    def _try_elsewhere(
        self, job: Job, component: Component, error: str, sizes: tuple[int, int], *, for_good: bool, now: float
    ) -> Job:
        """Retry a rejected job on other clusters, or here with another size; ``for_good``: never again as now.

        ``sizes``: the smallest and the largest rejected size. If no other cluster or size is possible, the job waits
        until it may be tried again, or fails.
        """
        self._note_refusal(job, component, error, now)
        is_error_of_cluster = not for_good and self._is_error_of_cluster(job, component.cluster, error, now)
        problem = error[:MAX_WORDS_LENGTH]
        job, refusal = self._attempts.bar_cluster(job, component.cluster, problem, now, sizes, for_good=for_good)
        job = self._ledger.change_job(job, claiming_tries=max(0, job.claiming_tries - 1))
        self._arrays.share_refusals(job)
        refusals = [entry for entry in job.refusals if entry.cause is RefusalCause.REJECTED or entry.bars(now)]
        reason = f"{REFUSED}: {refusal_text(refusal, now)}"
        barred = frozenset(entry.sizes for entry in refusals)
        if not self._questions.refusal_on_empty_grid(job.spec, barred):
            return self._attempts.end_attempt(job, JobState.QUEUED, reason, now)
        unknown = [entry for entry in refusals if entry.until is not None]
        # Failures, failed claims and limits of an account pass: a cluster that only they bar could still take the job.
        rejections = [e for e in refusals if e.cause is RefusalCause.REJECTED and (e.until is None or e.times)]
        rejected = frozenset(entry.sizes for entry in rejections)
        is_rejected = bool(self._questions.refusal_on_empty_grid(job.spec, rejected))
        times = sum(entry.times for entry in rejections if entry.until is not None)
        if not unknown or (is_rejected and not is_error_of_cluster and times >= MAX_REFUSALS):
            messages = "; ".join(f"{entry.cluster}: {entry.words}" for entry in refusals)
            reason = f"every cluster that could take it has refused it: {messages}"
            if not unknown:
                self._arrays.give_up_array_of(job, reason, now)
            return self._attempts.end_attempt(job, JobState.FAILED, reason, now)
        retry_at = max(now, min(entry.until for entry in unknown if entry.until is not None))
        job = self._ledger.change_job(job, retry_at=retry_at if retry_at > now else None)
        return self._attempts.end_attempt(job, JobState.QUEUED, reason, now)

    def end_refusal_pause(self, ident: JobId) -> None:
        """Try a job again on a cluster that rejected it."""
        job = self._ledger.get(ident)
        if job is not None:
            self._queues.regroup_job(job)

    def forget_refusals(self, cluster: ClusterName, *, unknown_only: bool = False) -> None:
        """Forget the jobs that a repaired cluster rejected, or only its unrecognized rejections."""
        for job in list(self._ledger.jobs.values()):
            remaining = tuple(r for r in job.refusals if r.cluster != cluster or (unknown_only and r.until is None))
            if remaining != job.refusals:
                forgotten = [refusal.until for refusal in job.refusals if refusal not in remaining]
                job = self._ledger.change_job(job, refusals=remaining)
                self._queues.regroup_job(job)
                if job.retry_at is not None and job.retry_at in forgotten:
                    self._attempts.end_pause(job.id, job.retry_at)

    def restore_timers(self, job: Job) -> None:
        """Restore the pauses after rejections of a job of an earlier daemon run."""
        for refusal in job.refusals:
            if refusal.until is not None:
                self._timers.add(refusal.until, Deadline.REFUSAL, job=job.id)

    def _note_refusal(self, job: Job, component: Component, error: str, now: float) -> None:
        self._ledger.count_failed_attempt(component.cluster, AttemptFailure.REFUSED)
        self._ledger.record_event(job, now, "error", error, component)

    def _is_error_of_cluster(self, job: Job, name: ClusterName, error: str, now: float) -> bool:
        """Return whether jobs of several kinds were rejected with this message. If so, count an error of the
        cluster."""
        spec = job.spec
        names = spec.owner, self._accounts.local_user(spec.owner, name), spec.name, application_of(spec)
        kind = spec.owner, application_of(spec), spec.request
        if not self._grid[name].health.unknown_refusals.add(normalize_words(error, names), kind):
            return False
        self._health.count_error(name, f"jobs of several users or kinds are refused in the same words: {error}", now)
        return True
