"""The unfinished jobs. All changes of jobs are made here, checked against the state machine, and recorded as effects.

A job is changed in place until it has been handed out by ``share``. After that it never changes: the next change is
made in a copy (docs/adr/0022-copy-on-write-jobs.md).
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from koalapy.model.advice import AdvisedPlacement
from koalapy.model.construction import make_copier
from koalapy.model.errors import ConflictError
from koalapy.model.job import (
    ACTIVE_STATES,
    ARRAY_TRANSITIONS,
    FINAL_STATES,
    TRANSITIONS,
    Attempt,
    Component,
    Job,
    JobId,
    JobState,
    TimelineEntry,
    Token,
)
from koalapy.model.job_spec import Priority
from koalapy.model.placement import RefusalKind
from koalapy.model.request import ClusterName, Request
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure, Command, Effects, OpenBarrier, SubmitComponent
from koalapy.scheduler.owner_use import OwnerUse

STARTS = (SubmitComponent, OpenBarrier)


class Ledger:
    """The unfinished jobs, and the effects collected since they were last taken.

    ``changes`` are new values of fields by name; a name that is no field raises ``AttributeError``.
    """

    def __init__(self, use: OwnerUse, touch: Callable[[ClusterName], None]) -> None:
        """``use`` counts the limited use of owners; ``touch`` is called for each cluster that has changed."""
        self.records_timelines = True
        """Whether timeline entries are recorded."""
        self.jobs: dict[JobId, Job] = {}
        self._own: dict[JobId, set[int]] = {}
        """The jobs not handed out since their last copy; for each, the indices of the components of which that holds.
        """
        self._tokens: dict[Token, tuple[JobId, int]] = {}
        """Job and index of every component of a live attempt, by token."""
        self.on_job_removed: list[Callable[[Job], None]] = []
        """Called with each job that has become final."""
        self.on_streams: Callable[[int], None] = lambda _: None
        """Called with each change of the number of streams that live attempts have reserved at the hub."""
        self.unsent_submits: set[Token] = set()
        """Components submitted by effects that were not taken yet; no cluster knows them."""
        self.ended_tasks: list[Job] = []
        """Tasks that have become final and are not counted in their arrays yet."""
        self._use = use if use.counts else None
        self._touch = touch
        self._effects = Effects()

    def take_effects(self, *, share: bool) -> Effects:
        """Return the effects since the last call, without starts of attempts that have ended.

        ``share``: the caller keeps the jobs in them. Otherwise the unfinished ones change with the next events.
        """
        effects, self._effects = self._effects, Effects()
        self.unsent_submits.clear()
        if effects.commands:
            effects.commands = [c for c in effects.commands if not isinstance(c, STARTS) or c.token in self._tokens]
        if share:
            for job in effects.jobs:
                self._own.pop(job, None)
        return effects

    def share(self, job: Job) -> Job:
        """Hand out a job: return it, and never change this object again."""
        self._own.pop(job.id, None)
        return job

    def share_all(self) -> Iterable[Job]:
        """Hand out all unfinished jobs."""
        self._own.clear()
        return self.jobs.values()

    def get(self, job: JobId) -> Job | None:
        return self.jobs.get(job)

    def active_jobs(self) -> list[Job]:
        """Return the jobs with a live attempt."""
        return [self.jobs[job] for job in {job: None for job, _ in self._tokens.values()}]

    def find(self, token: Token) -> tuple[Job, Component] | None:
        """Return the job and the component of a live attempt that a token names; None if there is none."""
        location = self._tokens.get(token)
        if location is None:
            return None
        job = self.jobs[location[0]]
        return job, live(job).components[location[1]]

    def find_staged(self, token: Token) -> tuple[Job, Component] | None:
        """Return the job and the component of the live attempt with the stage of this token; None if there is none."""
        location = self._tokens.get(token)  # its rank was once the index of a component of that attempt
        job = self.jobs[location[0]] if location is not None else None
        component = job.staged_component_of(token) if job is not None else None
        return (job, component) if job is not None and component is not None else None

    def restore(self, job: Job) -> None:
        """Add a job of an earlier daemon run."""
        self.jobs[job.id] = job
        if job.is_placed:
            self._name_components(job, 0)
            self._change_streams(0, live(job).streams)
        if self._use is not None:
            self._use.update(job, None)

    def store_job(self, job: Job) -> Job:
        """Store a job object that the caller keeps and that must not be changed in place."""
        previous = self.jobs.get(job.id)
        self.jobs[job.id] = job
        self._own.pop(job.id, None)
        return self._changed(job, previous.state if previous is not None else None)

    def change_job(self, job: Job, **changes: Any) -> Job:
        """Change fields of a job; a new ``attempt`` ends the previous one."""
        was = job.state if job.id in self.jobs else None
        job = self._owned(job)
        attempt = job.attempt
        for name, value in changes.items():
            _set(job, name, value)
        if "spec" in changes:
            self._effects.respecified.add(job.id)
        if job.attempt is not attempt:
            if attempt is not None:
                self._effects.attempts.append((job.id, attempt))
            self._own[job.id] = set(range(len(live(job).components)))
            self._name_components(job, 0)
            self._change_streams(0, live(job).streams)
        return self._changed(job, was)

    def use_equal_request(self, job: Job, request: Request) -> None:
        """Replace a job's request by an equal object, to save memory in long queues."""
        _set(job.spec, "request", request)

    def change_state(
        self, job: Job, state: JobState, now: float, event: str, reason: str = "", *, by: str = "", **changes: Any
    ) -> Job:
        """Change a job's state with a timeline entry. Raise ``ConflictError`` if the state machine forbids it."""
        if state not in (TRANSITIONS if job.tasks is None else ARRAY_TRANSITIONS)[job.state]:
            raise ConflictError(f"job {job.id} cannot go from {job.state} to {state}")
        job = self.change_job(job, state=state, reason=reason, **changes)
        self.record_event(job, now, event, reason, by=by)
        return job

    def change_attempt(self, job: Job, **changes: Any) -> Job:
        """Change fields of the live attempt. Its number of components never decreases."""
        job = self._owned(job)
        attempt = live(job)
        count, streams = len(attempt.components), attempt.streams
        for name, value in changes.items():
            _set(attempt, name, value)
        if len(attempt.components) > count:
            self._name_components(job, count)
        self._change_streams(streams, attempt.streams)
        self._effects.jobs[job.id] = job
        return job

    def update_component(self, job: Job, index: int, **changes: Any) -> Job:
        """Change fields of one component of the live attempt."""
        job = self._owned(job)
        attempt, owned = live(job), self._own[job.id]
        component = attempt.components[index]
        if index not in owned:
            owned.add(index)
            component = _copy_of_component(component)
            _set(attempt, "components", (*attempt.components[:index], component, *attempt.components[index + 1 :]))
        for name, value in changes.items():
            _set(component, name, value)
        self._effects.jobs[job.id] = job
        return job

    def _owned(self, job: Job) -> Job:
        """Return the job as an object that may be changed in place; copy it if it was handed out."""
        if job.id in self._own:
            return self.jobs[job.id]
        job = _copy_of_job(job)
        if job.attempt is not None:
            _set(job, "attempt", _copy_of_attempt(job.attempt))
        self._own[job.id] = set()
        self.jobs[job.id] = job
        return job

    def _changed(self, job: Job, was: JobState | None) -> Job:
        """Update counters and indices after a job has changed from state ``was`` (None: new). Remove final jobs."""
        state = job.state
        if was is not state:
            if self._use is not None:
                self._use.update(job, was)
            if was in ACTIVE_STATES and state not in ACTIVE_STATES and job.tasks is None:
                for component in live(job).components:
                    del self._tokens[job.token(component.index)]
                self._change_streams(live(job).streams, 0)
            if state in FINAL_STATES:
                self.jobs.pop(job.id, None)
                self._own.pop(job.id, None)
                for forget in self.on_job_removed:
                    forget(job)
                if job.array_job is not None:
                    self.ended_tasks.append(job)
        self._effects.jobs[job.id] = job
        return job

    def _change_streams(self, old: int, new: int) -> None:
        if old != new:
            self.on_streams(new - old)

    def _name_components(self, job: Job, first: int) -> None:
        """Index the tokens of the live attempt's components, from index ``first`` on."""
        for index in range(first, len(live(job).components)):
            self._tokens[job.token(index)] = job.id, index

    def record_event(
        self, job: Job, now: float, event: str, reason: str = "", component: Component | None = None, *, by: str = ""
    ) -> None:
        """Add an entry to the job's timeline; ``by`` is the acting user, if there is one."""
        if not self.records_timelines:
            return
        index, cluster = (component.index, component.cluster) if component else (None, None)
        self._effects.timeline.append(
            TimelineEntry(job.id, now, event, job.state, reason, job.generation, index, cluster, by)
        )

    def send_command(self, command: Command) -> None:
        self._effects.commands.append(command)
        if isinstance(command, SubmitComponent):
            self.unsent_submits.add(command.token)

    def request_confirmation(self, cluster: str) -> None:
        self._effects.confirm.add(cluster)

    def record_advised_placement(self, placement: AdvisedPlacement) -> None:
        self._effects.advised.append(placement)

    def record_scan_count(self, queue: Priority, scans: int) -> None:
        self._effects.scans[queue] = scans

    def count_refusals(self, kind: RefusalKind, times: int = 1) -> None:
        _count(self._effects.refusals, kind, times)

    def count_failed_claim(self, cluster: str, failure: ClaimFailure) -> None:
        _count(self._effects.claims_failed, (cluster, failure))

    def count_failed_attempt(self, cluster: str, failure: AttemptFailure) -> None:
        _count(self._effects.attempts_failed, (cluster, failure))

    def warn(self, text: str) -> None:
        self._effects.warnings.append(text)

    @property
    def has_changed_clusters(self) -> bool:
        """Return whether the state of a cluster may have changed since the effects were last taken."""
        return bool(self._effects.clusters)

    def mark_cluster_changed(self, name: str) -> None:
        self._effects.clusters.add(name)
        self._touch(name)


def live(job: Job) -> Attempt:
    """Return the live attempt of an active job. Raise ``ConflictError`` if it has none."""
    if job.attempt is None:
        raise ConflictError(f"job {job.id} has no attempt")
    return job.attempt


_set = object.__setattr__
"""For jobs, attempts and components only; their types present them as frozen to all other code."""


T = TypeVar("T")


def _count(counts: dict[T, int], key: T, times: int = 1) -> None:
    """Increment a counter. Plain dictionaries are faster here: each cycle creates three, and most stay empty."""
    counts[key] = counts.get(key, 0) + times


_copy_of_job, _copy_of_attempt = make_copier(Job), make_copier(Attempt)
_copy_of_component = make_copier(Component)
