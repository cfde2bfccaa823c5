"""Rules of users of the grid and local users of clusters."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from koalapy.model.array import ArrayFail, TaskIndices
from koalapy.model.cluster import LinkUse
from koalapy.model.dependency import Dependency, EndCondition
from koalapy.model.errors import BusyError, ConflictError, LimitReached, NeverAllowed, NotFoundError, UsageError
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import CHANGEABLE_FIELDS, ClaimingMode, JobSpec, Launcher, Priority
from koalapy.model.request import (
    FixedRequest,
    FlexibleRequest,
    InputFile,
    NonFixedRequest,
    Request,
    StopWarning,
    WarningSignal,
)
from koalapy.scheduler.events import Event, JobCancelled, JobChanged, JobHeld, JobReleased, JobSubmitted
from koalapy.scheduler.queue.start_conditions import find_missed_deadline
from tests.scheduler.machine.base import CLUSTER_SIZES, MAX_OPEN_JOBS, Machine, cluster_names, cycle_counts, indexes
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import Program

sizes = st.integers(1, 4)
inputs = st.one_of(
    st.none(),
    st.none(),
    st.builds(InputFile, st.just("file"), st.sampled_from([200, 2000]), cluster_names.map(lambda name: (name,))),
)
spelled_out = st.one_of(
    st.lists(sizes, min_size=1, max_size=4).map(lambda some: nonfixed(*some)),
    st.dictionaries(cluster_names, st.integers(1, 3), min_size=1).map(lambda some: fixed(**some)),
)


def with_input(request: FixedRequest | NonFixedRequest, file: InputFile | None) -> Request:
    components = tuple(replace(component, inputs=(file,) if file else ()) for component in request.components)
    return FixedRequest(components) if isinstance(request, FixedRequest) else NonFixedRequest(components)


requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(flexible, st.integers(1, 9), st.integers(1, 3), st.sampled_from([None, None, 1, 2, 3])),
    st.just(flexible(6, split=((6,), (4, 2), (3, 3), (2, 2, 2)))),
    st.builds(with_input, spelled_out, inputs),
)
POLICIES = {
    FlexibleRequest: (
        *("", "", "", "cluster-minimization", "communication-aware", "adaptive", "auto", "faster-first"),
        *("resource-matching", "resource-matching:non-saturated"),
    ),
    NonFixedRequest: ("", "", "close-to-files"),
    FixedRequest: ("",),
}


def submitted(request: Request, pick: int, **options: Any) -> JobSpec:
    policies = POLICIES[type(request)]
    policy, _, mode = policies[pick % len(policies)].partition(":")
    return JobSpec(request, ("program",), policy, (("mode", mode),) if mode else (), **options)


arrays = st.sampled_from([None, None, None, None, "1-3", "0-8:2", "1-6%1", "2,4,7-9%2"]).map(
    lambda text: TaskIndices.parse(text) if text else None
)
specs = st.builds(
    submitted,
    requests,
    st.integers(0, 10),
    priority=st.sampled_from(Priority),
    launcher=st.sampled_from(Launcher),
    owner=st.sampled_from(["ann", "bob", "cy"]),
    home_site=st.one_of(st.just(""), cluster_names),
    walltime=st.sampled_from([60.0, 60.0, 4.0, None]),
    warning=st.sampled_from([None, None, StopWarning(WarningSignal.TERM, 0.5), StopWarning(WarningSignal.USR1, 30.0)]),
    claiming=st.sampled_from([None, None, *ClaimingMode]),
    claim_threshold=st.sampled_from([None, None, None, 0.0, 0.7]),
    max_placement_tries=st.sampled_from([None, None, 1, 3]),
    max_claiming_tries=st.sampled_from([None, None, 2]),
    retry_on_exit=st.sampled_from([(), (), (137,)]),
    collect=st.sampled_from([(), (), ("*",)]),
    application=st.sampled_from(["", "", "solver"]),
    per_node_bandwidth=st.sampled_from([None, None, 5.0, 40.0]),
    links=st.sampled_from([LinkUse.ANY, LinkUse.ANY, LinkUse.ANY, LinkUse.DIRECT, LinkUse.RELAYED]),
    processes_per_node=st.sampled_from([None, None, 2]),
    array=arrays,
    array_fail=st.sampled_from(ArrayFail),
)
codes = st.sampled_from([0, 0, 3])


class Users(Machine):
    """Submitting, holding, releasing, reprioritizing and cancelling jobs."""

    def can_submit(self) -> bool:
        return len(self.jobs_in(*JobState)) < MAX_OPEN_JOBS

    def admitted_specs(self, specs: list[JobSpec]) -> list[JobSpec]:
        """Return the jobs that the daemon would admit now."""
        return [spec for spec in specs if self.is_possible(spec) and self.is_admitted(spec)]

    def is_admitted(self, spec: JobSpec) -> bool:
        try:
            self.world.queries.admit(spec)
        except (LimitReached, NeverAllowed, BusyError):
            return False
        return True

    @precondition(can_submit)
    @rule(job_specs=st.lists(specs, min_size=1, max_size=4), code=codes, rounds=cycle_counts)
    def submit(self, job_specs: list[JobSpec], code: int, rounds: int) -> None:
        for spec in job_specs:
            for admitted in self.admitted_specs([spec]):
                self.world.submit_together([admitted], Program(code=code))
        self.run_usual_steps(rounds)

    @precondition(can_submit)
    @rule(job_specs=st.lists(specs, min_size=2, max_size=5), pick=indexes, rounds=cycle_counts)
    def submit_together(self, job_specs: list[JobSpec], pick: int, rounds: int) -> None:
        """Submit jobs of both priorities and cancel a waiting job in one transaction."""
        jobs = self.world.new_jobs(self.admitted_specs(job_specs))
        waiting = self.jobs_in(JobState.QUEUED)
        cancelled = [JobCancelled(waiting[pick % len(waiting)])] if waiting else []
        self.world.step([*cancelled, *(JobSubmitted(job) for job in jobs)])
        self.run_usual_steps(rounds)

    @precondition(can_submit)
    @rule(spec=specs, acts=st.lists(st.sampled_from(["hold", "release", "high", "low", "cancel"]), max_size=5))
    def submit_and_change(self, spec: JobSpec, acts: list[str]) -> None:
        """Submit and change a job in one transaction."""
        if not self.admitted_specs([spec]):
            return
        [job] = self.world.new_jobs([spec])
        events: list[Event] = [JobSubmitted(job)]
        state = JobState.QUEUED
        for act in acts:
            if act == "cancel":
                events.append(JobCancelled(job.id))
                break
            if act in ("high", "low"):
                events.append(JobChanged(job.id, replace(job.spec, priority=Priority(act))))
            elif act == "hold" and state is JobState.QUEUED:
                events.append(JobHeld(job.id))
                state = JobState.HELD
            elif act == "release" and state is JobState.HELD:
                events.append(JobReleased(job.id))
                state = JobState.QUEUED
        self.world.step(events)

    @precondition(lambda self: self.can_submit() and bool(self.world.jobs))
    @rule(
        spec=specs,
        clauses=st.lists(st.dictionaries(indexes, st.sampled_from(EndCondition), min_size=1, max_size=3), max_size=3),
        begin_in=st.sampled_from([None, None, -5.0, 0.0, 3.0, 40.0]),
        deadline_in=st.sampled_from([None, None, None, 5.0, 70.0, 150.0]),
        rounds=cycle_counts,
    )
    def submit_deferred(
        self,
        spec: JobSpec,
        clauses: list[dict[int, EndCondition]],
        begin_in: float | None,
        deadline_in: float | None,
        rounds: int,
    ) -> None:
        """Submit a job after the last jobs, of any state, with a begin and a deadline."""
        last, now = list(self.world.jobs)[-8:], self.world.now
        after = tuple(
            tuple(Dependency(last[pick % len(last)], condition) for pick, condition in clause.items())
            for clause in clauses
        )
        begin, deadline = (None if delay is None else now + delay for delay in (begin_in, deadline_in))
        spec = replace(spec, after=after, begin=begin, deadline=deadline)
        if not self.world.unmet_clauses(after).failure and not find_missed_deadline(spec, self.world.rules, now):
            for admitted in self.admitted_specs([spec]):
                self.world.submit_together([admitted])
            self.run_usual_steps(rounds)

    @precondition(lambda self: self.jobs_in(*JobState))
    @rule(pick=indexes, times=st.sampled_from([1, 1, 1, 8]), warn=st.booleans())
    def cancel(self, pick: int, times: int, warn: bool) -> None:
        """Cancel one or several jobs in one transaction."""
        jobs = self.jobs_in(*JobState)
        chosen = [jobs[n % len(jobs)] for n in range(pick, pick + min(times, len(jobs)))]
        # An array is cancelled with its tasks.
        chosen = [job for job in chosen if self.world.jobs[job].array_job not in chosen]
        self.world.step([JobCancelled(job, warn=warn) for job in chosen])

    @precondition(lambda self: self.waiting_arrays())
    @rule(pick=indexes, position=st.integers(0, 8), warn=st.booleans())
    def cancel_task(self, pick: int, position: int, warn: bool) -> None:
        """Cancel a task of an array by its number, whether or not it was started."""
        array = self.waiting_arrays()[pick % len(self.waiting_arrays())]
        number = array.id + 1 + position % array.array_size
        if number not in self.world.jobs or not self.world.jobs[number].state.is_final:
            with suppress(NotFoundError):  # it was cancelled before
                self.world.step([JobCancelled(number, warn=warn)])

    @precondition(lambda self: self.waiting_arrays())
    @rule(pick=indexes, text=st.sampled_from(["1-3", "2-8:2", "7", "0,4-6"]))
    def cancel_tasks(self, pick: int, text: str) -> None:
        """Cancel some tasks of an array, as far as it has them and they are unfinished."""
        array = self.waiting_arrays()[pick % len(self.waiting_arrays())]
        with suppress(UsageError, ConflictError):
            self.world.step([JobCancelled(array.id, tasks=TaskIndices.parse(text))])

    def waiting_arrays(self) -> list[Job]:
        """Return the arrays with tasks that were never started."""
        return [job for job in self.world.jobs.values() if job.tasks is not None and job.tasks.pending]

    @precondition(lambda self: self.jobs_in(JobState.QUEUED))
    @rule(pick=indexes, all_jobs=st.sampled_from([False, False, False, True]))
    def hold(self, pick: int, all_jobs: bool) -> None:
        jobs = self.jobs_in(JobState.QUEUED)
        self.world.step([JobHeld(job) for job in (jobs if all_jobs else [jobs[pick % len(jobs)]])])

    @precondition(lambda self: self.jobs_in(JobState.HELD))
    @rule(pick=indexes, all_jobs=st.booleans())
    def release(self, pick: int, all_jobs: bool) -> None:
        jobs = self.jobs_in(JobState.HELD)
        self.world.step([JobReleased(job) for job in (jobs if all_jobs else [jobs[pick % len(jobs)]])])

    @precondition(lambda self: self.jobs_in(JobState.QUEUED, JobState.HELD))
    @rule(pick=indexes, priority=st.sampled_from(Priority), all_jobs=st.sampled_from([False, False, True]))
    def change_priority(self, pick: int, priority: Priority, all_jobs: bool) -> None:
        jobs = self.jobs_in(JobState.QUEUED, JobState.HELD)
        chosen = jobs if all_jobs else [jobs[pick % len(jobs)]]
        self.world.step([self.world.change_event(job, priority=priority) for job in chosen])

    @precondition(lambda self: self.jobs_in(JobState.QUEUED, JobState.HELD))
    @rule(pick=indexes, spec=specs)
    def change_request(self, pick: int, spec: JobSpec) -> None:
        """Give a waiting job another request, as far as a submission of it would be accepted."""
        jobs = self.jobs_in(JobState.QUEUED, JobState.HELD)
        job = self.world.jobs[jobs[pick % len(jobs)]]
        fields = {name: getattr(spec, name) for name in CHANGEABLE_FIELDS}
        if self.admitted_specs([replace(job.spec, **fields)]):
            self.world.change(job.id, **fields)

    # Local users

    @rule(name=cluster_names, size=sizes)
    def add_local_user(self, name: str, size: int) -> None:
        site = self.world.sites[name]
        if len(self.users[name]) < CLUSTER_SIZES[name]:
            self.users[name].append(site.add_local_user(min(size, CLUSTER_SIZES[name])))

    @precondition(lambda self: any(self.users.values()))
    @rule(name=cluster_names)
    def remove_local_user(self, name: str) -> None:
        if self.users[name]:
            self.world.sites[name].remove_local_user(self.users[name].pop(0))
