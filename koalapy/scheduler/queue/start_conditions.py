"""Defer queued jobs until other jobs have ended and their begin has come, and fail those that can no longer start.

A deferred job is queued, but outside its placement queue. It enters the queue like a new job, and its earlier wait
does not count.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from koalapy.model.dependency import Clause, End, describe_clauses, resolve_ends
from koalapy.model.errors import reject
from koalapy.model.job import END_TEXTS, Job, JobId, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.wording import format_duration, format_time
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.state import Deadline, SchedulerState


def warning_grace(spec: JobSpec, rules: Rules) -> float:
    """Return how many seconds before its stop a job's program is warned; 0 without a warning."""
    return 0.0 if spec.warning is None else min(spec.warning.grace, rules.warning_max)


def latest_start(spec: JobSpec, rules: Rules) -> float | None:
    """Return the time from which a job could not end before its deadline, or would be warned of it at once.

    None without a deadline.
    """
    return None if spec.deadline is None else spec.deadline - max(spec.walltime or 0.0, warning_grace(spec, rules))


def find_missed_deadline(spec: JobSpec, rules: Rules, now: float) -> str:
    """Return why a job that starts now could not end before its deadline; empty if it could."""
    latest = latest_start(spec, rules)
    if spec.deadline is None or latest is None or now < latest:
        return ""
    kind = f"the end of reservation {spec.reservation}," if spec.reservation else "deadline"
    deadline, walltime = f"{kind} {format_time(spec.deadline, now, exact=True)} UTC", spec.walltime or 0.0
    if now >= spec.deadline:
        return f"{deadline} has passed"
    if now >= spec.deadline - walltime:
        return f"{deadline} can no longer be met: its walltime is {format_duration(walltime)}"
    grace = format_duration(warning_grace(spec, rules))
    return f"{deadline} can no longer be met: its program would be warned {grace} before"


def describe_deferral(awaits: tuple[Clause, ...], begin: float | None, now: float) -> str:
    """Return what a deferred job waits for, as text."""
    texts = [f"waits for {describe_clauses(awaits)}"] if awaits else []
    if begin is not None and begin > now:
        texts.append(f"{'and ' if texts else 'waits '}until {format_time(begin, now, exact=True)} UTC")
    return " ".join(texts) or "waits for the next scan"


class StartConditions:
    """The deferral of queued jobs by their dependencies, begin and deadline."""

    def __init__(
        self, state: SchedulerState, queues: PlacementQueues, give_up_array: Callable[[Job, str, float], None]
    ) -> None:
        """``give_up_array`` fails the waiting tasks of an array for a reason, at a time."""
        self._give_up_array = give_up_array
        self._rules, self._ledger, self._timers, self._queues = state.rules, state.ledger, state.timers, queues
        self._reservations = state.reservations
        self._dependents: defaultdict[JobId, set[JobId]] = defaultdict(set)
        """The unfinished jobs that name an unfinished job in ``after``, by that job."""
        self.ended: list[tuple[JobId, JobState | None]] = []
        """Ended jobs with dependents that have not been considered yet; None: it is not known how they ended."""
        state.ledger.on_job_removed.append(self._note_end)

    def dependents_of(self, job: JobId) -> list[JobId]:
        """Return the unfinished jobs that name an unfinished job in ``after``."""
        return sorted(self._dependents.get(job, ()))

    # Jobs that come

    def admit(self, job: Job, now: float) -> None:
        """Add a new job to its queue, or defer it. Raise ``UsageError`` if it waits for a job that has ended."""
        if not _has_conditions(job.spec):
            self._queues.add_new(job)
            return
        for clause in job.awaits:
            for dependency in clause:
                if self._ledger.get(dependency.job) is None:
                    problem = f"names job {dependency.job}, which is not unfinished"
                    reject("after", dependency.job, problem, "name a job that koala queue shows")
        is_deferred = job.is_deferred and self._must_wait(job, now)
        self._queues.add_new(job, deferred=is_deferred)
        job = self._ledger.jobs[job.id]
        if job.is_deferred and not is_deferred:
            self._ledger.change_job(job, eligible_at=now)
        self._watch(job)

    def release(self, job: Job, now: float) -> None:
        """Add a job that was held to its queue, unless it is still deferred."""
        if job.is_deferred and self._must_wait(job, now):
            self._queues.pause(job)
        elif job.is_deferred:
            self._make_eligible(job, now)
        elif job.is_in_queue:
            self._queues.release(self._restart_wait(job, now))

    def restore(self, job: Job) -> None:
        """Take up a job of an earlier daemon run."""
        if job.is_deferred and job.state is JobState.QUEUED:
            self._queues.pause(job)
        self._watch(job)
        for ident in sorted({d.job for clause in job.awaits for d in clause if self._ledger.get(d.job) is None}):
            self._dependents[ident].add(job.id)
            self.ended.append((ident, None))

    def _watch(self, job: Job) -> None:
        """Watch the jobs that a job waits for, its begin and its latest start."""
        for dependency in _dependencies_of(job):
            if self._ledger.get(dependency) is not None:
                self._dependents[dependency].add(job.id)
        if job.is_deferred and (job.spec.begin is not None or not job.awaits):
            self._timers.add(job.spec.begin or 0.0, Deadline.BEGIN, job=job.id)
        if (latest := latest_start(job.spec, self._rules)) is not None:
            self._timers.add(latest, Deadline.LATEST_START, job=job.id)

    # Events that concern them

    def begin(self, job_id: JobId, now: float) -> None:
        """Let a job start at its begin."""
        self._release_if_met(job_id, now)

    def expire(self, job_id: JobId, now: float) -> None:
        """Fail a job that waits though it could no longer end before its deadline."""
        job = self._ledger.get(job_id)
        if job is not None and job.state.is_waiting:
            self._fail(job, find_missed_deadline(job.spec, self._rules, now), now)

    def end_reservation(self, name: str, reason: str, now: float) -> None:
        """Fail the jobs that wait for nodes of a reservation that is not in force any more."""
        for job in [job for job in self._ledger.jobs.values() if job.spec.reservation == name and job.state.is_waiting]:
            self._fail(job, f"reservation {name} {reason}", now)

    def settle(self, now: float) -> bool:
        """Release or fail the jobs that wait for jobs that have ended since the last call. Fail jobs queued after the
        end of their reservation, also after an attempt or by an earlier daemon run.

        Return whether there were any.
        """
        has_settled = bool(self._queues.unreserved)
        while self._queues.unreserved:
            job = self._ledger.get(self._queues.unreserved.pop())
            if job is not None and job.state.is_waiting and self._reservations.get(job.spec.reservation) is None:
                name = job.spec.reservation
                self._fail(job, f"reservation {name} {self._reservations.why_ended(name)}", now)
        while self.ended:
            ended, state = self.ended.pop(0)
            for dependent in self.dependents_of(ended):
                has_settled = True
                self._resolve(dependent, ended, state, now)
            self._dependents.pop(ended, None)
        return has_settled

    def _resolve(self, job_id: JobId, ended: JobId, state: JobState | None, now: float) -> None:
        """Apply the end of a job to one that waits for it."""
        job = self._ledger.get(job_id)
        if job is None or not job.awaits:
            return
        succeeded = None if state is None else state is JobState.SUCCEEDED
        end = "is not known any more" if state is None else END_TEXTS[state]
        resolution = resolve_ends(job.awaits, {ended: End(end, succeeded)})
        if resolution.failure:
            self._fail(job, f"dependency: {resolution.failure}", now)
        elif resolution.remaining != job.awaits:
            self._ledger.change_job(job, awaits=resolution.remaining)
            self._release_if_met(job_id, now)

    def _release_if_met(self, job_id: JobId, now: float) -> None:
        """Add a deferred job to its queue once all of its conditions are met; a held one stays held."""
        job = self._ledger.get(job_id)
        if job is None or job.state is not JobState.QUEUED or not job.is_deferred or self._must_wait(job, now):
            return
        self._make_eligible(job, now)

    def _make_eligible(self, job: Job, now: float) -> None:
        job = self._ledger.change_job(job, eligible_at=now)
        self._ledger.record_event(job, now, "eligible", "its dependencies are met" if job.spec.after else "its begin")
        self._queues.release(self._restart_wait(job, now))

    def _restart_wait(self, job: Job, now: float) -> Job:
        """Count the wait of an array's next task from now on."""
        return job if job.tasks is None else self._ledger.change_job(job, tasks=replace(job.tasks, waits_since=now))

    def _fail(self, job: Job, reason: str, now: float) -> None:
        if job.tasks is not None:
            self._give_up_array(job, reason, now)
            return
        if job.state is JobState.QUEUED:
            job = self._queues.remove(job)
        self._ledger.change_state(job, JobState.FAILED, now, "failed", reason, ended_at=now)

    def _must_wait(self, job: Job, now: float) -> bool:
        return bool(job.awaits) or (job.spec.begin is not None and now < job.spec.begin)

    def _note_end(self, job: Job) -> None:
        """Note the end of a job that others wait for, and forget its own dependencies."""
        if job.id in self._dependents:
            self.ended.append((job.id, job.state))
        if not _has_conditions(job.spec):
            return
        self._timers.cancel(job.id, 0, Deadline.BEGIN, Deadline.LATEST_START)
        for dependency in _dependencies_of(job):
            if (dependents := self._dependents.get(dependency)) is not None:
                dependents.discard(job.id)
                if not dependents:
                    del self._dependents[dependency]


def _has_conditions(spec: JobSpec) -> bool:
    return bool(spec.after) or spec.begin is not None or spec.deadline is not None


def _dependencies_of(job: Job) -> Iterator[JobId]:
    """Yield the jobs that a job names in ``after``."""
    return (dependency.job for clause in job.spec.after for dependency in clause)
