"""Claiming: from a placement to an open barrier, and the way back (semantics 5).

Atomic claiming: every component is started at once, on nodes the grid view called idle. Local users may be faster;
then the runner stays queued in its LRM, and after ``claim_grace`` the whole claim is given up.
"""

from dataclasses import replace

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState, Launcher
from koalapy.model.placement import Placement
from koalapy.scheduling.commands import ForgetComponent, OpenBarrier, StopComponent, SubmitComponent
from koalapy.scheduling.grid import GridBook
from koalapy.scheduling.ledger import Ledger, live
from koalapy.scheduling.rules import Rules
from koalapy.scheduling.timers import Deadline, Timers

END_GRACE = 2.0
"""Seconds that components have to end by themselves after the program succeeded."""


class Claiming:
    """Gives nodes to placed jobs and takes them back."""

    def __init__(self, rules: Rules, ledger: Ledger, grid: GridBook, timers: Timers) -> None:
        self._rules = rules
        self._ledger = ledger
        self._grid = grid
        self._timers = timers

    def start(self, job: Job, placement: Placement, now: float) -> Job:
        """Begin an attempt: a new generation, its nodes promised, its runners on their way to the LRMs."""
        components = tuple(
            Component(index, placed.cluster, placed.size, ComponentState.SUBMITTED, request_index=placed.request_index)
            for index, placed in enumerate(placement.components)
        )
        generation = job.generation + 1
        attempt = Attempt(generation, components, placed_at=now)
        job = self._ledger.move(
            job, JobState.PLACED, now, "placed", placement.reason,
            generation=generation, attempt=attempt, placed_at=now, ending=None,
            placement_tries=job.placement_tries + 1,
        )  # fmt: skip
        job = self._ledger.move(
            job, JobState.CLAIMING, now, "claiming", _sites(attempt), claiming_tries=job.claiming_tries + 1
        )
        for component in components:
            token = job.token(component.index)
            self._grid[component.cluster].promise(token, component.size)
            self._ledger.command(SubmitComponent(component.cluster, token))
        self._timers.add(now + self._rules.barrier_timeout, Deadline.BARRIER, job=job.id, generation=generation)
        return job

    def component_waits(self, job: Job, component: Component, now: float) -> Job:
        """The LRM has queued the runner: local users may have been faster."""
        self.allow_grace(job, component, now)
        return self._ledger.update_component(job, component.index, state=ComponentState.WAITING)

    def allow_grace(self, job: Job, component: Component, now: float) -> None:
        """Give up the claim if the runner is still queued when the grace is over."""
        self._timers.add(
            now + self._rules.claim_grace, Deadline.CLAIM_GRACE,
            job=job.id, generation=job.generation, component=component.index,
        )  # fmt: skip

    def component_claimed(self, job: Job, component: Component, now: float) -> Job:
        """All nodes of a component have reported."""
        job = self._ledger.update_component(job, component.index, state=ComponentState.CLAIMED, claimed_at=now)
        self._ledger.note(job, now, "claimed", f"{component.size} nodes on {component.cluster}", component)
        return job

    def open_barrier_if_complete(self, job: Job, now: float) -> Job:
        """Start the program once every component is claimed and every one of their clusters is in sight."""
        attempt = live(job)
        if attempt.barrier_at is not None or job.state is not JobState.CLAIMING:
            return job
        if any(c.state is not ComponentState.CLAIMED for c in attempt.components):
            return job
        job = self._ledger.move(
            job, JobState.STARTING, now, "started", "every node has reported: the barrier is open",
            attempt=replace(attempt, barrier_at=now), started_at=now,
        )  # fmt: skip
        for component in attempt.components:
            self._ledger.command(OpenBarrier(component.cluster, job.token(component.index)))
        self._timers.add(now + self._rules.barrier_timeout, Deadline.LAUNCH, job=job.id, generation=job.generation)
        return job

    def launched(self, job: Job, now: float) -> Job:
        """The program runs on all nodes."""
        attempt = live(job)
        if attempt.launched_at is not None or attempt.barrier_at is None:
            return job
        job = self._ledger.change(job, attempt=replace(attempt, launched_at=now))
        if job.spec.walltime is not None:
            self._timers.add(now + job.spec.walltime, Deadline.WALLTIME, job=job.id, generation=job.generation)
        if job.state is JobState.STARTING and job.ending is None:
            job = self._ledger.move(job, JobState.RUNNING, now, "running")
        return job

    def end(self, job: Job, becomes: JobState, reason: str, now: float, *, exit_code: int | None = None) -> Job:
        """The attempt is over; the job becomes ``becomes`` when every component has ended.

        After a success the components end by themselves and are told so only when they linger; else at once.
        """
        attempt = replace(live(job), end_reason=reason, exit_code=exit_code)
        if attempt.ended_at is None:
            attempt = replace(attempt, ended_at=now)
        job = self._ledger.change(job, attempt=attempt, ending=becomes, reason=reason)
        self._ledger.note(job, now, "ending", reason)
        if becomes is JobState.SUCCEEDED:
            self._timers.add(now + END_GRACE, Deadline.STOP, job=job.id, generation=job.generation)
            return job
        return self.stop_components(job)

    def stop_components(self, job: Job) -> Job:
        """Tell every component that has not ended to end."""
        attempt = live(job)
        for component in attempt.components:
            if component.state not in (ComponentState.ENDED, ComponentState.STOPPING):
                command = StopComponent(component.cluster, job.token(component.index), attempt.end_reason)
                self._ledger.command(command)
                job = self._ledger.update_component(job, component.index, state=ComponentState.STOPPING)
        return job

    def component_ended(self, job: Job, component: Component, now: float) -> Job:
        """The cluster has its nodes back."""
        token = job.token(component.index)
        self._grid[component.cluster].release(token)
        self._ledger.command(ForgetComponent(component.cluster, token))
        return self._ledger.update_component(
            job, component.index, state=ComponentState.ENDED, ended_at=now, unknown_since=None
        )


def telling(job: Job) -> tuple[Component, ...]:
    """The components that tell an exit code: only the head (Open MPI), or every one its own."""
    attempt = live(job)
    return (attempt.head,) if job.spec.launcher is Launcher.OPENMPI else attempt.components


def program_result(job: Job) -> int | None:
    """The program's exit code, once it is certain: the first failure, or 0 when all that must tell have told 0."""
    codes = [c.exit_code for c in telling(job)]
    failed = next((code for code in codes if code), None)
    if failed is not None:
        return failed
    return 0 if all(code == 0 for code in codes) else None


def is_launched(job: Job) -> bool:
    return all(c.state is ComponentState.RUNNING or c.exit_code is not None for c in telling(job))


def derived_state(job: Job) -> JobState:
    """The state that follows from what is known of the components."""
    attempt = live(job)
    if any(c.unknown_since is not None for c in attempt.components if c.state is not ComponentState.ENDED):
        return JobState.UNKNOWN
    if attempt.barrier_at is None:
        return JobState.CLAIMING
    return JobState.STARTING if attempt.launched_at is None else JobState.RUNNING


def _sites(attempt: Attempt) -> str:
    return ", ".join(f"{c.size} on {c.cluster}" for c in attempt.components)
