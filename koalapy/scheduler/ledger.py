"""The unfinished jobs, and the one way to change them: checked against the state machine, and noted.

A job changes in place as long as nothing outside has seen it: what was handed out by ``share`` never changes, the next
change is made in a copy (docs/adr/0022-copy-on-write-jobs.md).
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from operator import attrgetter
from typing import TypedDict, TypeVar, Unpack

from koalapy.model.advice import AdvisedPlacement
from koalapy.model.errors import ConflictError
from koalapy.model.job import (
    ACTIVE_STATES,
    FINAL_STATES,
    TRANSITIONS,
    Attempt,
    ClusterRefusal,
    Component,
    ComponentState,
    Job,
    JobId,
    JobSpec,
    JobState,
    Priority,
    TimelineEntry,
    Token,
)
from koalapy.model.placement import RefusalKind
from koalapy.model.request import ClusterName, Request
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure, Command, Effects, OpenBarrier, SubmitComponent
from koalapy.scheduler.owner_use import OwnerUse

STARTS = (SubmitComponent, OpenBarrier)


class MoveChanges(TypedDict, total=False):
    """The fields of a job that change, but state and reason."""

    spec: JobSpec
    generation: int
    queue_seq: int
    placement_tries: int
    claiming_tries: int
    restarts: int
    counted_scan: int
    claim_factor: float | None
    first_start_estimate: float | None
    placed_at: float | None
    started_at: float | None
    ended_at: float | None
    retry_at: float | None
    ending: JobState | None
    exit_code: int | None
    refusals: tuple[ClusterRefusal, ...]
    attempt: Attempt | None


class JobChanges(MoveChanges, total=False):
    """The fields of a job that change."""

    state: JobState
    reason: str


class AttemptChanges(TypedDict, total=False):
    """The fields of an attempt that change."""

    components: tuple[Component, ...]
    start_estimate: float | None
    claim_at: float | None
    barrier_at: float | None
    launched_at: float | None
    ended_at: float | None
    end_reason: str
    exit_code: int | None


class ComponentChanges(TypedDict, total=False):
    """The fields of a component that change."""

    cluster: ClusterName
    node_class: str
    state: ComponentState
    superseded: bool
    hosts: tuple[str, ...]
    lrm_job: str | None
    lease: float | None
    exit_code: int | None
    error: str
    infrastructure: bool
    sources: tuple[ClusterName, ...]
    transfer_time: float
    stage_size: int
    staged: int
    staging_since: float | None
    staged_at: float | None
    submitted_at: float | None
    claimed_at: float | None
    warned_at: float | None
    ended_at: float | None
    unknown_since: float | None
    lost_at: float | None


class Ledger:
    """Jobs that are not final, and the effects gathered since they were last taken."""

    def __init__(self, use: OwnerUse, touch: Callable[[ClusterName], None]) -> None:
        """``use`` is told what owners have; ``touch`` of each cluster that has changed."""
        self.records_timelines = True
        """Whether somebody reads them."""
        self.jobs: dict[JobId, Job] = {}
        self._own: dict[JobId, set[int]] = {}
        """The jobs that nobody outside has seen, with their attempts; and the components of these of which that holds,
        by their indices."""
        self._tokens: dict[Token, tuple[JobId, int]] = {}
        """Job and index of every component of a live attempt."""
        self.on_job_removed: list[Callable[[JobId], None]] = []
        """Who forgets a job once it is over."""
        self.unsent_submits: set[Token] = set()
        """Components that are submitted by effects that were not taken yet: no cluster knows of them."""
        self._use = use if use.counts else None
        self._touch = touch
        self._effects = Effects()

    def take_effects(self, *, share: bool) -> Effects:
        """Return the effects since the last call, without starts of attempts that are over. Unless they are shared, the
        unfinished jobs in them change with the next events."""
        effects, self._effects = self._effects, Effects()
        self.unsent_submits.clear()
        effects.commands = [c for c in effects.commands if not isinstance(c, STARTS) or c.token in self._tokens]
        if share:
            for job in effects.jobs:
                self._own.pop(job, None)
        return effects

    def share(self, job: Job) -> Job:
        """A job for somebody outside: it stays as it is."""
        self._own.pop(job.id, None)
        return job

    def share_all(self) -> Iterable[Job]:
        """All of them."""
        self._own.clear()
        return self.jobs.values()

    def get(self, job: JobId) -> Job | None:
        return self.jobs.get(job)

    def active_jobs(self) -> list[Job]:
        """The jobs with a live attempt."""
        return [self.jobs[job] for job in dict.fromkeys(job for job, _ in self._tokens.values())]

    def find(self, token: Token) -> tuple[Job, Component] | None:
        """The component of a live attempt that a token names, and its job."""
        named = self._tokens.get(token)
        if named is None:
            return None
        job = self.jobs[named[0]]
        return job, live(job).components[named[1]]

    def find_staged(self, token: Token) -> tuple[Job, Component] | None:
        """The component of a live attempt whose stage a token names, and its job."""
        named = self._tokens.get(token)  # its rank was once the index of a component of that attempt
        job = self.jobs[named[0]] if named is not None else None
        component = job.staged_component_of(token) if job is not None else None
        return (job, component) if job is not None and component is not None else None

    def restore(self, job: Job) -> None:
        """Take up a job of an earlier life."""
        self.jobs[job.id] = job
        if job.state.is_active:
            self._name_components(job, 0)
        if self._use is not None:
            self._use.update(job, None)

    def store_job(self, job: Job) -> Job:
        """Keep a job that was made elsewhere, which is another's value."""
        before = self.jobs.get(job.id)
        self.jobs[job.id] = job
        self._own.pop(job.id, None)
        return self._changed(job, before.state if before is not None else None)

    def change_job(self, job: Job, **changes: Unpack[JobChanges]) -> Job:
        """Change fields of a job; a new ``attempt`` ends the one before."""
        was = job.state if job.id in self.jobs else None
        job = self._owned(job)
        attempt = job.attempt
        for name, value in changes.items():
            _set(job, name, value)
        if job.attempt is not attempt:
            if attempt is not None:
                self._effects.attempts.append((job.id, attempt))
            self._own[job.id] = set(range(len(live(job).components)))
            self._name_components(job, 0)
        return self._changed(job, was)

    def use_equal_request(self, job: Job, request: Request) -> None:
        """Have a job's own request make way for an equal one, as nobody can tell: a queue is mostly requests."""
        _set(job.spec, "request", request)

    def change_state(
        self,
        job: Job,
        state: JobState,
        now: float,
        event: str,
        reason: str = "",
        *,
        by: str = "",
        **changes: Unpack[MoveChanges],
    ) -> Job:
        """Change the job's state, if the state machine allows it, with a timeline entry that says why."""
        if state not in TRANSITIONS[job.state]:
            raise ConflictError(f"job {job.id} cannot go from {job.state} to {state}")
        job = self.change_job(job, state=state, reason=reason, **changes)
        self.record_event(job, now, event, reason, by=by)
        return job

    def change_attempt(self, job: Job, **changes: Unpack[AttemptChanges]) -> Job:
        """Change fields of the live attempt, whose components only grow in number."""
        job = self._owned(job)
        attempt = live(job)
        before = len(attempt.components)
        for name, value in changes.items():
            _set(attempt, name, value)
        if len(attempt.components) > before:
            self._name_components(job, before)
        self._effects.jobs[job.id] = job
        return job

    def update_component(self, job: Job, index: int, **changes: Unpack[ComponentChanges]) -> Job:
        """Change one component of the live attempt."""
        job = self._owned(job)
        attempt, own = live(job), self._own[job.id]
        component = attempt.components[index]
        if index not in own:
            own.add(index)
            component = _copy_of_component(component)
            _set(attempt, "components", (*attempt.components[:index], component, *attempt.components[index + 1 :]))
        for name, value in changes.items():
            _set(component, name, value)
        self._effects.jobs[job.id] = job
        return job

    def _owned(self, job: Job) -> Job:
        """The job as a record that nobody outside has seen."""
        if job.id in self._own:
            return self.jobs[job.id]
        job = _copy_of_job(job)
        if job.attempt is not None:
            _set(job, "attempt", _copy_of_attempt(job.attempt))
        self._own[job.id] = set()
        self.jobs[job.id] = job
        return job

    def _changed(self, job: Job, was: JobState | None) -> Job:
        """A job has changed, which was in that state before, or is new; a final one leaves the ledger."""
        state = job.state
        if was is not state:
            if self._use is not None:
                self._use.update(job, was)
            if was in ACTIVE_STATES and state not in ACTIVE_STATES:
                for component in live(job).components:
                    del self._tokens[job.token(component.index)]
            if state in FINAL_STATES:
                self.jobs.pop(job.id, None)
                self._own.pop(job.id, None)
                for forget in self.on_job_removed:
                    forget(job.id)
        self._effects.jobs[job.id] = job
        return job

    def _name_components(self, job: Job, first: int) -> None:
        """Components of the live attempt are found by their tokens, from the first of these on."""
        for index in range(first, len(live(job).components)):
            self._tokens[job.token(index)] = job.id, index

    def record_event(
        self, job: Job, now: float, event: str, reason: str = "", component: Component | None = None, *, by: str = ""
    ) -> None:
        """Add a line to the job's timeline; ``by`` is the user whose doing it was, if it was one's."""
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

    def record_advised_placement(self, given: AdvisedPlacement) -> None:
        self._effects.advised.append(given)

    def record_scan_count(self, queue: Priority, scans: int) -> None:
        self._effects.scans[queue] = scans

    def count_refusals(self, kind: RefusalKind, times: int = 1) -> None:
        _count(self._effects.refusals, kind, times)

    def count_failed_claim(self, cluster: str, why: ClaimFailure) -> None:
        _count(self._effects.claims_failed, (cluster, why))

    def count_failed_attempt(self, cluster: str, why: AttemptFailure) -> None:
        _count(self._effects.attempts_failed, (cluster, why))

    def warn(self, text: str) -> None:
        self._effects.warnings.append(text)

    @property
    def has_changed_clusters(self) -> bool:
        """Whether a cluster's state may have changed since the effects were last taken."""
        return bool(self._effects.clusters)

    def mark_cluster_changed(self, name: str) -> None:
        self._effects.clusters.add(name)
        self._touch(name)


def live(job: Job) -> Attempt:
    """The attempt of an active job."""
    if job.attempt is None:
        raise ConflictError(f"job {job.id} has no attempt")
    return job.attempt


_set = object.__setattr__
"""For records only: everybody else is told by their types that they do not change."""


T = TypeVar("T")


def _count(counts: dict[T, int], what: T, times: int = 1) -> None:
    """A Counter would do; each step has three of them, and hardly any is ever used."""
    counts[what] = counts.get(what, 0) + times


def _copies(kind: type[T]) -> Callable[[T], T]:
    """What makes a copy of a value, field by field."""
    values = attrgetter(*(field.name for field in fields(kind)))  # type: ignore[arg-type]
    return lambda value: kind(*values(value))


_copy_of_job, _copy_of_attempt, _copy_of_component = _copies(Job), _copies(Attempt), _copies(Component)
