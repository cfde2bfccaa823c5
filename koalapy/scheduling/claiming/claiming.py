"""Claiming: from a placement to an open barrier, and the way back (semantics 5).

A placed job is claimed for at its JCT, and again until its JST: whatever components can start are started, if they are
at least the fraction T of all, others are re-placed, and a job of high priority preempts low ones. ``atomic`` is T = 1.
A runner that stays queued in its LRM longer than ``claim_grace`` was overtaken by local users: that component's claim
has failed, and another takes its place.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from koalapy.model.cluster import GridView
from koalapy.model.job import Attempt, ClaimingMode, Component, ComponentState, Job, JobState, Launcher, Nonce, Priority
from koalapy.model.placement import PlacedComponent, Placement
from koalapy.model.request import ClusterName
from koalapy.model.transfer import Transfer, transfer_to
from koalapy.scheduling.claiming import staging
from koalapy.scheduling.claiming.preemption import Preemption
from koalapy.scheduling.effects import ForgetComponent, OpenBarrier, StopComponent, SubmitComponent
from koalapy.scheduling.ledger import live
from koalapy.scheduling.queueing.tries import may_not_be_claimed, tries_used_up
from koalapy.scheduling.state import SchedulerState
from koalapy.scheduling.timers import Deadline

END_GRACE = 2.0
"""Seconds that components have to end by themselves after the program succeeded."""
CLAIM_FAILED = "claim-failed"
PREEMPTED = "preempted"

Relocate = Callable[[Job, Component, GridView, float], "tuple[ClusterName, Transfer] | None"]
"""Another site for a component on the nodes of a view, its transfer to take at most so many seconds."""

Nonces = Callable[[], Nonce]
"""Gives another nonce each time."""


@dataclass(slots=True)
class Try:
    """What one claiming try found: components that can start now, and those that cannot where they are."""

    free: dict[ClusterName, int]
    startable: list[Component] = field(default_factory=list)
    blocked: list[Component] = field(default_factory=list)
    preempting: list[Component] = field(default_factory=list)
    """Of those that can start: those that wait for others to be preempted."""
    one_each: frozenset[ClusterName] = frozenset()
    """Clusters on probation, where one component may be tried at a time."""

    def take(self, component: Component) -> None:
        self.free[component.cluster] -= component.size
        self.startable.append(component)

    def untake(self, component: Component) -> None:
        """It goes elsewhere."""
        self.free[component.cluster] += component.size
        self.startable.remove(component)

    def room(self, cluster: ClusterName) -> int | None:
        """Nodes that are left for another component; None where there may be none."""
        if cluster in self.one_each and any(taken.cluster == cluster for taken in self.startable):
            return None
        return self.free.get(cluster)


class Claiming:
    """Gives nodes to placed jobs and takes them back."""

    def __init__(self, state: SchedulerState, relocate: Relocate, nonces: Nonces) -> None:
        self._rules, self._ledger, self._grid, self._timers = state.rules, state.ledger, state.grid, state.timers
        self._relocate = relocate
        self._nonces = nonces
        self.preemption = Preemption(state)

    # The claiming queue

    def start(self, job: Job, placement: Placement, now: float) -> Job:
        """Begin an attempt: a new generation, in the claiming queue at its first JCT, which may be at once."""
        components = tuple(self._placed(job, index, placed, now) for index, placed in enumerate(placement.components))
        transfer_time = max(component.transfer_time for component in components)
        generation, start_estimate = job.generation + 1, now + transfer_time
        claim_at = now + self._factor(job) * transfer_time
        first = job.first_start_estimate if job.first_start_estimate is not None else start_estimate
        job = self._ledger.move(
            job,
            JobState.PLACED,
            now,
            "placed",
            placement.reason,
            generation=generation,
            placed_at=now,
            started_at=None,
            ending=None,
            attempt=Attempt(generation, components, now, start_estimate, claim_at, nonce=self._nonces()),
            placement_tries=job.placement_tries + 1,
            first_start_estimate=first,
        )
        for component in components:
            staging.begin(self._ledger, job, component, now)
        if claim_at > now:
            self._timers.add(claim_at, Deadline.CLAIM, job=job.id, generation=generation)
            return job
        return self.claim(job, now)

    def _placed(self, job: Job, index: int, placed: PlacedComponent, now: float) -> Component:
        sources, seconds = placed.sources, placed.transfer_time
        files = job.spec.inputs_of(placed.request_index)
        if files and not sources:
            transfer = transfer_to(placed.cluster, files, self._grid.view(), self._rules.assumed_bandwidth)
            if transfer is not None:
                sources, seconds = transfer.sources, transfer.seconds
        return Component(
            index,
            placed.cluster,
            placed.size,
            request_index=placed.request_index,
            sources=sources,
            transfer_time=seconds,
            staging_since=now if job.spec.has_stage(placed.request_index) else None,
        )

    def _factor(self, job: Job) -> float:
        return self._rules.claim_factor if job.claim_factor is None else job.claim_factor

    def _threshold(self, job: Job) -> float:
        spec, rules = job.spec, self._rules
        mode = spec.claiming or (ClaimingMode.INCREMENTAL if spec.claim_threshold is not None else rules.claiming)
        if mode is ClaimingMode.ATOMIC:
            return 1.0
        return rules.claim_threshold if spec.claim_threshold is None else spec.claim_threshold

    def claim_is_due(self, job: Job, at: float, now: float) -> Job:
        """A JCT has come; an older one than the attempt's own means nothing any more."""
        attempt = live(job)
        if attempt.claim_at != at or not _has_placed(attempt):
            return job
        job = self.foresee(job, now)
        following = self._next_try(job, now) if live(job).start_estimate != attempt.start_estimate else None
        if following is None:
            return self.claim(job, now)
        # Its files come later than was thought: nodes would only wait for them.
        return self._claim_at(job, following)

    def foresee(self, job: Job, now: float) -> Job:
        """Let the JST follow transfers that are slower than they were estimated; it is never sooner than that."""
        end = staging.expected_end(live(job), now)
        return job if end is None else self._expect(job, end, now)

    def _expect(self, job: Job, end: float, now: float) -> Job:
        attempt = live(job)
        estimates = (c.staging_since + c.transfer_time for c in attempt.gang if c.staging_since is not None)
        first = max(estimates, default=attempt.placed_at)
        end, before = max(end, first), attempt.start_estimate or now
        if attempt.barrier_at is not None or abs(end - before) <= self._rules.claim_epsilon:
            return job
        return self._ledger.change(job, attempt=replace(attempt, start_estimate=end))

    def files_are_there(self, job: Job, now: float) -> Job:
        """All transfers are over: there is nothing to wait for with the next claiming try."""
        job = self._expect(job, now, now)
        attempt = live(job)
        if _has_placed(attempt) and attempt.claim_at is not None and attempt.claim_at > now:
            return self.claim(job, now)
        return job

    def claim(self, job: Job, now: float) -> Job:
        """One claiming try (ICP): start what can be started, and come back for the rest, or give up at the JST."""
        attempt = live(job)
        job = self._ledger.change(job, claiming_tries=job.claiming_tries + 1, attempt=replace(attempt, claim_at=now))
        this = self._look(job)
        gang = len(attempt.gang)
        if (gang - len(this.blocked)) / gang < self._threshold(job):
            found = f"{gang - len(this.blocked)} of {gang} components could start"
            self._ledger.note(job, now, "claim-try", f"{found}: fewer than wanted")
            return self._come_back(job, this.blocked, now)
        job = self._replace(job, this, now)
        for cluster in sorted({component.cluster for component in this.preempting}):
            self._preempt_for(job, this, cluster, now)
        if this.startable and job.state is JobState.PLACED:
            job = self._ledger.move(job, JobState.CLAIMING, now, "claiming", _sites(this.startable))
        elif this.startable:
            self._ledger.note(job, now, "claiming", _sites(this.startable))
        else:
            self._ledger.note(job, now, "claim-try", f"no room on {_clusters(this.blocked)}")
        for component in this.startable:
            job = self._start(job, component, now)
        if this.blocked:
            return self._come_back(job, this.blocked, now)
        self._await_barrier(job, now)
        return job

    def _look(self, job: Job) -> Try:
        """Which components could start where they are; for a job of high priority also by preemption."""
        clusters = [cluster for cluster in self._grid.clusters() if cluster.is_open]
        on_trial = () if self._grid.is_all_on_trial else (cluster.name for cluster in clusters if cluster.probation)
        this = Try({cluster.name: cluster.available for cluster in clusters}, one_each=frozenset(on_trial))
        waiting = [component for component in live(job).gang if component.state is ComponentState.PLACED]
        for component in sorted(waiting, key=lambda c: (-c.size, c.rank)):
            room = this.room(component.cluster)
            if room is not None and component.size <= room:
                this.take(component)
            elif room is not None and self._may_preempt(job) and self._could_preempt(this, component):
                this.preempting.append(component)
                this.take(component)
            else:
                this.blocked.append(component)
        return this

    def _may_preempt(self, job: Job) -> bool:
        return job.spec.priority is Priority.HIGH and self._rules.preemption != "never"

    def _could_preempt(self, this: Try, component: Component) -> bool:
        cluster = self._grid[component.cluster]
        taken = cluster.available - this.free[component.cluster]
        return component.size + taken <= self.preemption.room(cluster)

    def _preempt_for(self, job: Job, this: Try, cluster: ClusterName, now: float) -> None:
        """Make room for all components that are about to start on a cluster."""
        needed = sum(component.size for component in this.startable if component.cluster == cluster)
        for victim in self.preemption.victims(cluster, needed) or ():
            reason = f"{PREEMPTED}: {cluster} is needed for job {job.id} of high priority"
            self._ledger.note(victim, now, PREEMPTED, reason)
            self.end(victim, JobState.QUEUED, reason, now)

    def _replace(self, job: Job, this: Try, now: float) -> Job:
        """Find other sites for components that cannot start, their transfers to be over by the JST."""
        wanted = [*this.blocked, *this.preempting]
        if not wanted:
            return job
        attempt = live(job)
        left = max(0.0, (attempt.start_estimate or now) - now)
        for component in wanted:
            view = self._grid.view(lambda status: this.room(status.name) or 0)
            found = self._relocate(job, component, view, left)
            if found is None:
                continue
            cluster, transfer = found
            job = self._ledger.update_component(
                job,
                component.index,
                cluster=cluster,
                sources=transfer.sources,
                transfer_time=transfer.seconds,
                staging_since=now if component.staging else None,
                stage_size=0,
                staged=0,
                staged_at=None,
            )
            moved = live(job).components[component.index]
            self._ledger.note(job, now, "re-placed", f"{component.cluster} had no room", moved)
            staging.end(self._ledger, job, component)
            staging.begin(self._ledger, job, moved, now)
            if component in this.blocked:
                this.blocked.remove(component)
            else:
                this.preempting.remove(component)
                this.untake(component)
            this.take(moved)
        return job

    def _start(self, job: Job, component: Component, now: float) -> Job:
        """Hand a component's runner to its LRM, its nodes promised."""
        token = job.token(component.index)
        self._grid[component.cluster].promise(token, component.size)
        self._ledger.command(SubmitComponent(component.cluster, token))
        return self._ledger.update_component(job, component.index, state=ComponentState.SUBMITTED, submitted_at=now)

    def _come_back(self, job: Job, blocked: list[Component], now: float) -> Job:
        """Another try at the next JCT, unless that is as good as the JST: then the job gives up what it has."""
        where = _clusters(blocked)
        if may_not_be_claimed(job, self._rules):
            return self.give_up(job, f"no room on {where}", now)
        following = self._next_try(job, now)
        if following is None:
            return self.give_up(job, f"no room on {where} before its start time", now)
        return self._claim_at(job, following)

    def _claim_at(self, job: Job, following: float) -> Job:
        job = self._ledger.change(job, attempt=replace(live(job), claim_at=following))
        self._timers.add(following, Deadline.CLAIM, job=job.id, generation=job.generation)
        return job

    def _next_try(self, job: Job, now: float) -> float | None:
        """The JCT that follows on one at this moment; None when it is as good as the JST, or no later than now."""
        start_estimate = live(job).start_estimate or now
        following = now + self._factor(job) * (start_estimate - now)
        later = following > now and start_estimate - following >= self._rules.claim_epsilon
        return following if later else None

    def give_up(self, job: Job, reason: str, now: float) -> Job:
        """The claim has failed: all components are aborted, L is lowered, and the job queues again if it may."""
        rules, factor = self._rules, self._factor(job)
        lowered = max(min(factor, rules.claim_factor_min), factor - rules.claim_factor_step)
        job = self._ledger.change(job, claim_factor=lowered)
        if used_up := tries_used_up(job, rules):
            return self.end(job, JobState.FAILED, f"{used_up}: {reason}", now)
        return self.end(job, JobState.QUEUED, f"{CLAIM_FAILED}: {reason}", now)

    def _await_barrier(self, job: Job, now: float) -> None:
        attempt = live(job)
        self._timers.add(
            now + self._rules.barrier_timeout,
            Deadline.BARRIER,
            job=job.id,
            generation=job.generation,
            component=len(attempt.components),
        )

    def restore(self, job: Job, now: float) -> None:
        """Take up an attempt of an earlier life whose barrier is not open."""
        attempt = live(job)
        for component in attempt.gang:
            if component.state is ComponentState.WAITING:
                self.allow_grace(job, component, now)
        if _has_placed(attempt):
            at = max(now, attempt.claim_at or now)
            self._ledger.change(job, attempt=replace(attempt, claim_at=at))
            self._timers.add(at, Deadline.CLAIM, job=job.id, generation=job.generation)
        else:
            self._await_barrier(job, now)

    # Components on their way to the barrier

    def component_waits(self, job: Job, component: Component, now: float) -> Job:
        """The LRM has queued the runner: local users may have been faster."""
        self.allow_grace(job, component, now)
        return self._ledger.update_component(job, component.index, state=ComponentState.WAITING)

    def allow_grace(self, job: Job, component: Component, now: float) -> None:
        """Give up the claim if the runner is still queued when the grace is over."""
        self._timers.add(
            now + self._rules.claim_grace,
            Deadline.CLAIM_GRACE,
            job=job.id,
            generation=job.generation,
            component=component.index,
        )

    def overtaken(self, job: Job, component: Component, reason: str, now: float) -> Job:
        """A component gets no nodes: its claim has failed, and another stands in for it at the next try."""
        following = self._next_try(job, now)
        if following is None or may_not_be_claimed(job, self._rules):
            return self.give_up(job, reason, now)
        self._ledger.note(job, now, CLAIM_FAILED, reason, component)
        if component.state is not ComponentState.ENDED:
            job = self._stop(job, component, reason)
        job = self._ledger.update_component(job, component.index, superseded=True, error=reason)
        attempt = live(job)
        index = len(attempt.components)
        another = Component(
            index,
            component.cluster,
            component.size,
            request_index=component.request_index,
            sources=component.sources,
            transfer_time=component.transfer_time,
            replaces=component.rank,
            staging_since=component.staging_since,
            stage_size=component.stage_size,
            staged=component.staged,
            staged_at=component.staged_at,
        )
        job = self._ledger.change(job, attempt=replace(attempt, components=(*attempt.components, another)))
        return self._claim_at(job, following) if attempt.claim_at is None or attempt.claim_at <= now else job

    def component_claimed(self, job: Job, component: Component, now: float) -> Job:
        """All nodes of a component have reported."""
        job = self._ledger.update_component(job, component.index, state=ComponentState.CLAIMED, claimed_at=now)
        self._ledger.note(job, now, "claimed", f"{component.size} nodes on {component.cluster}", component)
        return job

    def open_barrier_if_complete(self, job: Job, now: float) -> Job:
        """Start the program once every component is claimed, their clusters in sight, and the transfers are over."""
        attempt = live(job)
        if attempt.barrier_at is not None or job.state is not JobState.CLAIMING:
            return job
        if any(c.state is not ComponentState.CLAIMED or c.awaits_files for c in attempt.gang):
            return job
        job = self._ledger.move(
            job,
            JobState.STARTING,
            now,
            "started",
            "every node has reported: the barrier is open",
            attempt=replace(attempt, barrier_at=now),
            started_at=now,
        )
        for component in attempt.gang:
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

    # The end

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
        """Tell every component that has not ended to end; one that was not started has nothing to end."""
        attempt = live(job)
        for component in attempt.components:
            if component.state is ComponentState.PLACED:
                job = self._ledger.update_component(
                    job, component.index, state=ComponentState.ENDED, ended_at=attempt.ended_at
                )
            elif not component.has_ended and component.state is not ComponentState.STOPPING:
                job = self._stop(job, component, attempt.end_reason)
        return job

    def _stop(self, job: Job, component: Component, reason: str) -> Job:
        """Tell a component to end: its nodes will be free soon."""
        token = job.token(component.index)
        self._ledger.command(StopComponent(component.cluster, token, reason))
        self._grid[component.cluster].leave(token)
        return self._ledger.update_component(job, component.index, state=ComponentState.STOPPING)

    def component_delivers(self, job: Job, component: Component, now: float) -> Job:
        """The cluster has its nodes back, and something of it is still to come."""
        if component.state is ComponentState.DELIVERING:
            return job
        self._grid[component.cluster].deliver(job.token(component.index))
        return self._ledger.update_component(job, component.index, state=ComponentState.DELIVERING, ended_at=now)

    def component_ended(self, job: Job, component: Component, now: float, missing: str = "") -> Job:
        """The cluster has its nodes back, and nothing more will come; ``missing`` says what of its output is lost."""
        token = job.token(component.index)
        self._grid[component.cluster].release(token)
        self._ledger.command(ForgetComponent(component.cluster, token))
        if missing:
            self._ledger.note(job, now, "output-missing", f"of its output there is missing {missing}", component)
        ended_at = component.ended_at if component.has_ended else now
        return self._ledger.update_component(
            job, component.index, state=ComponentState.ENDED, ended_at=ended_at, unknown_since=None
        )

    def rest_is_lost(self, job: Job, component: Component, why: str, now: float) -> None:
        """Its program ran, and what there is of it that has not come is not waited for."""
        if live(job).launched_at is not None:
            kinds = "output and results" if job.spec.collect else "output"
            what = f"of its {kinds} there is missing what had not come yet: {why}"
            self._ledger.note(job, now, "output-missing", what, component)


def telling(job: Job) -> tuple[Component, ...]:
    """The components that tell an exit code: only the head (Open MPI), or every one its own."""
    attempt = live(job)
    return (attempt.head,) if job.spec.launcher is Launcher.OPENMPI else attempt.gang


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
    if any(c.unknown_since is not None for c in attempt.gang if not c.has_ended):
        return JobState.UNKNOWN
    if attempt.barrier_at is None:
        return JobState.CLAIMING
    return JobState.STARTING if attempt.launched_at is None else JobState.RUNNING


def _has_placed(attempt: Attempt) -> bool:
    """Whether there are components to be claimed for."""
    return any(component.state is ComponentState.PLACED for component in attempt.gang)


def _clusters(components: list[Component]) -> str:
    return ", ".join(sorted({component.cluster for component in components}))


def _sites(components: list[Component]) -> str:
    return ", ".join(f"{c.size} on {c.cluster}" for c in sorted(components, key=lambda c: c.rank))
