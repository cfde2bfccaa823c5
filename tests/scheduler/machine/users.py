"""Users, of the grid and of its clusters."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from koalapy.model.errors import BusyError, LimitReached, NeverAllowed
from koalapy.model.job import ClaimingMode, JobSpec, JobState, Launcher, Priority
from koalapy.model.request import (
    FixedRequest,
    FlexibleRequest,
    InputFile,
    NonFixedRequest,
    Request,
    StopWarning,
    WarningSignal,
)
from koalapy.scheduler.events import Event, JobCancelled, JobHeld, JobPriorityChanged, JobReleased, JobSubmitted
from tests.scheduler.machine.base import CROWD, SIZES, Machine, names, picks, rounds
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import Program

sizes = st.integers(1, 4)
inputs = st.one_of(
    st.none(),
    st.none(),
    st.builds(InputFile, st.just("file"), st.sampled_from([200, 2000]), names.map(lambda name: (name,))),
)
spelled_out = st.one_of(
    st.lists(sizes, min_size=1, max_size=4).map(lambda some: nonfixed(*some)),
    st.dictionaries(names, st.integers(1, 3), min_size=1).map(lambda some: fixed(**some)),
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


def submitted(request: Request, pick: int, **given: Any) -> JobSpec:
    known = POLICIES[type(request)]
    policy, _, mode = known[pick % len(known)].partition(":")
    return JobSpec(request, ("program",), policy, (("mode", mode),) if mode else (), **given)


specs = st.builds(
    submitted,
    requests,
    st.integers(0, 10),
    priority=st.sampled_from(Priority),
    launcher=st.sampled_from(Launcher),
    owner=st.sampled_from(["ann", "bob", "cy"]),
    home_site=st.one_of(st.just(""), names),
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
)
codes = st.sampled_from([0, 0, 3])


class Users(Machine):
    """They submit, and change their minds."""

    def has_room(self) -> bool:
        return len(self.some(*JobState)) < CROWD

    def admitted(self, some: list[JobSpec]) -> list[JobSpec]:
        """Those of the jobs that the daemon would take in now."""
        return [spec for spec in some if self.is_possible(spec) and self.is_admitted(spec)]

    def is_admitted(self, spec: JobSpec) -> bool:
        try:
            self.world.queries.admit(spec)
        except (LimitReached, NeverAllowed, BusyError):
            return False
        return True

    @precondition(has_room)
    @rule(some=st.lists(specs, min_size=1, max_size=4), code=codes, rounds=rounds)
    def submit(self, some: list[JobSpec], code: int, rounds: int) -> None:
        for spec in some:
            for admitted in self.admitted([spec]):
                self.world.submit_together([admitted], Program(code=code))
        self.run_usual_steps(rounds)

    @precondition(has_room)
    @rule(some=st.lists(specs, min_size=2, max_size=5), pick=picks, rounds=rounds)
    def submit_together(self, some: list[JobSpec], pick: int, rounds: int) -> None:
        """Jobs of both queues in one transaction, and one that waits is cancelled in the same one."""
        jobs = self.world.new_jobs(self.admitted(some))
        waiting = self.some(JobState.QUEUED)
        cancelled = [JobCancelled(waiting[pick % len(waiting)])] if waiting else []
        self.world.step([*cancelled, *(JobSubmitted(job) for job in jobs)])
        self.run_usual_steps(rounds)

    @precondition(has_room)
    @rule(spec=specs, acts=st.lists(st.sampled_from(["hold", "release", "high", "low", "cancel"]), max_size=5))
    def submit_and_reconsider(self, spec: JobSpec, acts: list[str]) -> None:
        """All within one transaction."""
        if not self.admitted([spec]):
            return
        [job] = self.world.new_jobs([spec])
        events: list[Event] = [JobSubmitted(job)]
        state = JobState.QUEUED
        for act in acts:
            if act == "cancel":
                events.append(JobCancelled(job.id))
                break
            if act in ("high", "low"):
                events.append(JobPriorityChanged(job.id, Priority(act)))
            elif act == "hold" and state is JobState.QUEUED:
                events.append(JobHeld(job.id))
                state = JobState.HELD
            elif act == "release" and state is JobState.HELD:
                events.append(JobReleased(job.id))
                state = JobState.QUEUED
        self.world.step(events)

    @precondition(lambda self: self.some(*JobState))
    @rule(pick=picks, times=st.sampled_from([1, 1, 1, 8]), warn=st.booleans())
    def cancel(self, pick: int, times: int, warn: bool) -> None:
        """One job, or very many in one transaction."""
        jobs = self.some(*JobState)
        chosen = [jobs[n % len(jobs)] for n in range(pick, pick + min(times, len(jobs)))]
        self.world.step([JobCancelled(job, warn=warn) for job in chosen])

    @precondition(lambda self: self.some(JobState.QUEUED))
    @rule(pick=picks, everybody=st.sampled_from([False, False, False, True]))
    def hold(self, pick: int, everybody: bool) -> None:
        jobs = self.some(JobState.QUEUED)
        self.world.step([JobHeld(job) for job in (jobs if everybody else [jobs[pick % len(jobs)]])])

    @precondition(lambda self: self.some(JobState.HELD))
    @rule(pick=picks, everybody=st.booleans())
    def release(self, pick: int, everybody: bool) -> None:
        jobs = self.some(JobState.HELD)
        self.world.step([JobReleased(job) for job in (jobs if everybody else [jobs[pick % len(jobs)]])])

    @precondition(lambda self: self.some(JobState.QUEUED, JobState.HELD))
    @rule(pick=picks, priority=st.sampled_from(Priority), everybody=st.sampled_from([False, False, True]))
    def change_priority(self, pick: int, priority: Priority, everybody: bool) -> None:
        jobs = self.some(JobState.QUEUED, JobState.HELD)
        chosen = jobs if everybody else [jobs[pick % len(jobs)]]
        self.world.step([JobPriorityChanged(job, priority) for job in chosen])

    # Local users

    @rule(name=names, size=sizes)
    def local_user_comes(self, name: str, size: int) -> None:
        site = self.world.sites[name]
        if len(self.users[name]) < SIZES[name]:
            self.users[name].append(site.add_local_user(min(size, SIZES[name])))

    @precondition(lambda self: any(self.users.values()))
    @rule(name=names)
    def remove_local_user(self, name: str) -> None:
        if self.users[name]:
            self.world.sites[name].remove_local_user(self.users[name].pop(0))
