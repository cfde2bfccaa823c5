"""Claiming: from a placement until every component has been submitted, and the way back (semantics 5).

A placed job is claimed for at its JCT, and again until its JST: whatever components can start are started, if they are
at least the fraction T of all, others are re-placed, and a job of high priority preempts low ones. ``atomic`` is T = 1.
A runner that stays queued in its LRM longer than ``claim_grace`` has lost its nodes to local users: that component's
claim has failed, and another takes its place.
"""

from collections.abc import Callable

from koalapy.model.job import Attempt, ClaimingMode, Component, ComponentState, Job, JobState, Nonce
from koalapy.model.placement import PlacedComponent, Placement
from koalapy.model.transfer import transfer_to
from koalapy.model.wording import listed
from koalapy.scheduler.attempts.attempt_facts import unclaimed
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.claims import staging
from koalapy.scheduler.claims.claim_try import ClaimTry
from koalapy.scheduler.claims.preemption import Preemption
from koalapy.scheduler.claims.reclaiming import MakingRoom
from koalapy.scheduler.claims.relocation import Relocation
from koalapy.scheduler.effects import ClaimFailure
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.try_limits import may_not_be_claimed, tries_used_up
from koalapy.scheduler.state import SchedulerState
from koalapy.scheduler.timers import Deadline

CLAIM_FAILED = "claim-failed"

Nonces = Callable[[], Nonce]
"""Gives another nonce each time."""


class Claiming:
    """Decides when placed jobs are claimed for, and which of their components get nodes then."""

    def __init__(
        self, state: SchedulerState, attempts: Attempts, making_room: MakingRoom, relocation: Relocation, nonces: Nonces
    ) -> None:
        self._state, self._rules, self._ledger = state, state.rules, state.ledger
        self._attempts, self._making_room, self._relocation, self._nonces = attempts, making_room, relocation, nonces

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
            self._attempts.set_deadline(job, Deadline.CLAIM, claim_at)
            return job
        return self.claim(job, now)

    def _placed(self, job: Job, index: int, placed: PlacedComponent, now: float) -> Component:
        sources, seconds = placed.sources, placed.transfer_time
        files = job.spec.inputs_of(placed.request_index)
        if files and not sources:
            transfer = transfer_to(placed.cluster, files, self._state.grid.view(), self._rules.assumed_bandwidth)
            if transfer is not None:
                sources, seconds = transfer.sources, transfer.seconds
        return Component(
            index,
            placed.cluster,
            placed.size,
            request_index=placed.request_index,
            node_class=placed.node_class,
            sources=sources,
            transfer_time=seconds,
            staging_since=now if job.spec.has_stage(placed.request_index) else None,
        )

    def restore(self, job: Job, now: float) -> None:
        """Take up an attempt of an earlier life whose barrier is not open."""
        attempt = live(job)
        for component in attempt.gang:
            if component.state is ComponentState.WAITING:
                self._attempts.set_claim_timeout(job, component, now)
        if unclaimed(job):
            # Clusters have no room before they are heard of again, which takes them a moment.
            self._claim_at(job, max(now + self._rules.unreachable_after, attempt.claim_at or now))
        else:
            self._attempts.set_barrier_timeout(job, now)

    def claim_is_due(self, job: Job, at: float, now: float) -> Job:
        """A JCT has come; an older one than the attempt's own means nothing any more."""
        attempt = live(job)
        if attempt.claim_at != at or not unclaimed(job):
            return job
        estimated = attempt.start_estimate
        job = self.estimate_start(job, now)
        following = self._next_try(job, now) if live(job).start_estimate != estimated else None
        if following is None:
            return self.claim(job, now)
        # Its files come later than was thought: nodes would only wait for them.
        return self._claim_at(job, following)

    def estimate_start(self, job: Job, now: float) -> Job:
        """Let the JST follow transfers that are slower than they were estimated; it is never sooner than that."""
        end = staging.expected_end(live(job), now)
        return job if end is None else self._expect_files(job, end, now)

    def files_are_there(self, job: Job, now: float) -> Job:
        """All transfers are over: there is nothing to wait for with the next claiming try.

        But for clusters, where the daemon has just begun: of those that have not reported nobody knows the room.
        """
        job = self._expect_files(job, now, now)
        claim_at, components = live(job).claim_at, unclaimed(job)
        is_early = bool(components) and claim_at is not None and claim_at > now
        if is_early and all(self._state.grid[component.cluster].reported for component in components):
            return self.claim(job, now)
        return job

    def _expect_files(self, job: Job, end: float, now: float) -> Job:
        attempt = live(job)
        estimates = (c.staging_since + c.transfer_time for c in attempt.gang if c.staging_since is not None)
        first = max(estimates, default=attempt.placed_at)
        end, before = max(end, first), attempt.start_estimate or now
        if attempt.barrier_at is not None or abs(end - before) <= self._rules.claim_epsilon:
            return job
        return self._ledger.change_attempt(job, start_estimate=end)

    # A claiming try

    def claim(self, job: Job, now: float) -> Job:
        """One claiming try (ICP), step by step as docs/scheduling.md has them."""
        job = self._ledger.change(job, claiming_tries=job.claiming_tries + 1)
        job = self._ledger.change_attempt(job, claim_at=now)
        this = ClaimTry(self._state, self._making_room.of(job), job)
        # 1. With too few components that are started, or can be, nothing is started.
        if this.fraction < self._threshold(job):
            self._ledger.note(job, now, "claim-try", f"{this}: fewer than wanted")
            return self._try_again(job, this, now)
        # 2. Components that cannot start where they are may go elsewhere.
        job = self._relocate(job, this, now)
        # 3. Where that is not enough, jobs of low priority make room for one of high priority, or for one at its home.
        self._preempt(job, this, now)
        # 4. What can start is started, and waits at the barrier for the rest.
        job = self._submit(job, this, now)
        if this.blocked:
            return self._try_again(job, this, now)
        self._attempts.set_barrier_timeout(job, now)
        return job

    def _threshold(self, job: Job) -> float:
        """Return T, the fraction of the components that must be able to start.

        A job that sets a threshold and no mode is claimed for incrementally.
        """
        if job.spec.claim_threshold is not None:
            return 1.0 if job.spec.claiming is ClaimingMode.ATOMIC else job.spec.claim_threshold
        mode = job.spec.claiming or self._rules.claiming
        return 1.0 if mode is ClaimingMode.ATOMIC else self._rules.claim_threshold

    def _factor(self, job: Job) -> float:
        """Return L, which each failed claim of the job lowers."""
        return self._rules.claim_factor if job.claim_factor is None else job.claim_factor

    def _next_try(self, job: Job, now: float) -> float | None:
        """Return the JCT after a try at this moment, or None where it would be as good as the JST."""
        start_estimate = live(job).start_estimate or now
        following = now + self._factor(job) * (start_estimate - now)
        later = following > now and start_estimate - following >= self._rules.claim_epsilon
        return following if later else None

    def _relocate(self, job: Job, this: ClaimTry, now: float) -> Job:
        """Find other sites for components that cannot start, their transfers to be over by the JST."""
        left = max(0.0, (live(job).start_estimate or now) - now)
        for component in [*this.blocked, *this.preempting]:
            site = self._relocation.find(job, component, this.view, left)
            if site is None:
                continue
            cluster, transfer = site
            left_behind = component.cluster
            staging.end(self._ledger, job, component)
            job = self._ledger.update_component(
                job,
                component.index,
                cluster=cluster,
                node_class="",
                sources=transfer.sources,
                transfer_time=transfer.seconds,
                staging_since=now if component.staging else None,
                stage_size=0,
                staged=0,
                staged_at=None,
            )
            moved = live(job).components[component.index]
            self._ledger.note(job, now, "re-placed", f"{left_behind} had no room", moved)
            staging.begin(self._ledger, job, moved, now)
            this.move(moved, left_behind)
        return job

    def _preempt(self, job: Job, this: ClaimTry, now: float) -> None:
        """Make room for all components that are about to start on a cluster."""
        if (by := this.preemption) is None or not this.preempting:
            return
        room = by.make_room(this.preempted_nodes(), now)
        if room.awaited:
            jobs = listed([f"job {other.id}" for other, _ in room.awaited])
            self._ledger.note(job, now, "awaits", f"{jobs}, about to end: nobody is preempted for those nodes")
        for other, until in room.awaited:
            for component in live(other).components:
                self._state.grid[component.cluster].await_end(other.token(component.index), until)
        if room.victims and (told := by.told(room.victims)):
            self._ledger.note(job, now, "reclaims", told)
        for victim, where, why in room.victims:
            self._preempt_one(by, victim, where, job, why, now)

    def insist(self, job: Job, component: Component, now: float) -> None:
        """Nodes that a component was promised of jobs that were about to end are late: these make room after all."""
        cluster, by = self._state.grid[component.cluster], self._making_room.of(job)
        if by is None:
            return
        for token in cluster.overdue_for(job.token(component.index), now):
            if (found := self._ledger.find(token)) is not None:
                why = ", and it has not ended by itself as was expected"
                self._preempt_one(by, found[0], cluster.name, job, why, now)

    def _preempt_one(self, by: Preemption, victim: Job, where: str, job: Job, why: str, now: float) -> None:
        reason = by.reason(where, job)
        self._ledger.note(victim, now, by.event, reason + why)
        self._attempts.end(by.stopping(victim), JobState.QUEUED, reason, now, warn=True)

    def _submit(self, job: Job, this: ClaimTry, now: float) -> Job:
        starting = ", ".join(f"{c.size} on {c.cluster}" for c in sorted(this.startable, key=lambda c: c.rank))
        if not starting:
            self._ledger.note(job, now, "claim-try", f"no room on {_clusters(this.blocked)}")
        elif job.state is JobState.PLACED:
            job = self._ledger.move(job, JobState.CLAIMING, now, "claiming", starting)
        else:
            self._ledger.note(job, now, "claiming", starting)
        for component in this.startable:
            job = self._attempts.submit(job, component, now)
        return job

    # What follows from a claim that has failed

    def _try_again(self, job: Job, this: ClaimTry, now: float) -> Job:
        """Another try, unless the job is to give up what it has."""
        for component in this.blocked:
            self._ledger.count_failed_claim(component.cluster, ClaimFailure.NO_ROOM)
        where, following = _clusters(this.blocked), self._next_try(job, now)
        if not this.is_refused:
            job = self._uncounted(job)
            if following is None:
                return self._return(job, f"{where} cannot be used", now)
        elif may_not_be_claimed(job, self._rules):
            return self._give_up(job, f"no room on {where}", now)
        elif following is None:
            return self._give_up(job, f"no room on {where} before its start time", now)
        return self._claim_at(job, following)

    def component_failed(self, job: Job, component: Component, why: ClaimFailure, reason: str, now: float) -> Job:
        """A component gets no nodes: its claim has failed, and another stands in for it at the next try."""
        self._ledger.count_failed_claim(component.cluster, why)
        following = self._next_try(job, now)
        if not self._state.grid[component.cluster].is_in_reach:
            if following is None:
                # A try that has left others to be claimed for may be none already.
                return self._return(job if unclaimed(job) else self._uncounted(job), reason, now)
        elif following is None or may_not_be_claimed(job, self._rules):
            return self._give_up(job, reason, now)
        self._ledger.note(job, now, CLAIM_FAILED, reason, component)
        job = self._replace(job, component, reason)
        claim_at = live(job).claim_at
        return self._claim_at(job, following) if claim_at is None or claim_at <= now else job

    def _replace(self, job: Job, component: Component, reason: str) -> Job:
        """A component ends, and another, to be claimed for, stands in for it."""
        if component.state is not ComponentState.ENDED:
            job = self._attempts.stop(job, component, reason)
        job = self._ledger.update_component(job, component.index, superseded=True, error=reason)
        attempt = live(job)
        stand_in = Component(
            len(attempt.components),
            component.cluster,
            component.size,
            request_index=component.request_index,
            node_class=component.node_class,
            sources=component.sources,
            transfer_time=component.transfer_time,
            replaces=component.rank,
            staging_since=component.staging_since,
            stage_size=component.stage_size,
            staged=component.staged,
            staged_at=component.staged_at,
        )
        return self._ledger.change_attempt(job, components=(*attempt.components, stand_in))

    def _claim_at(self, job: Job, at: float) -> Job:
        job = self._ledger.change_attempt(job, claim_at=at)
        self._attempts.set_deadline(job, Deadline.CLAIM, at)
        return job

    def _give_up(self, job: Job, reason: str, now: float) -> Job:
        """The claim has failed: all components are aborted, L is lowered, and the job queues again if it may."""
        rules, factor = self._rules, self._factor(job)
        lowered = max(min(factor, rules.claim_factor_min), factor - rules.claim_factor_step)
        job = self._ledger.change(job, claim_factor=lowered)
        if used_up := tries_used_up(job, rules):
            return self._attempts.end(job, JobState.FAILED, f"{used_up}: {reason}", now)
        return self._return(job, reason, now)

    def _return(self, job: Job, reason: str, now: float) -> Job:
        """Nothing came of a claim: all components are aborted, and the job queues again."""
        return self._attempts.end(job, JobState.QUEUED, f"{CLAIM_FAILED}: {reason}", now)

    def _uncounted(self, job: Job) -> Job:
        """What a cluster that cannot be used has thwarted was no claiming try."""
        return self._ledger.change(job, claiming_tries=job.claiming_tries - 1)


def _clusters(components: list[Component]) -> str:
    return ", ".join(sorted({component.cluster for component in components}))
